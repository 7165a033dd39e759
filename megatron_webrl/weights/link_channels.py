"""Messages in flight on a link, over gloo or NCCL: post, count completions, close."""

from __future__ import annotations

import logging
import math
import queue
import re
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import tenacity
import torch

from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0  # a backend's own timeout exceeds the transfer's by this, so the transfer's always fires first
_ABORT_TAG = 2**31 - 1
_THREAD_SECONDS = 5.0


class GlooChannel:
    """Messages in flight on a gloo link. A thread waits for them in order and sets an event.

    They cannot be polled: gloo has no completion test, and a timed-out wait breaks the whole group.
    """

    poll_seconds = 0.25  # longest wait for the event

    def __init__(self, group: Any, peers: list[int]) -> None:
        self._group, self._peers = group, peers
        self._works: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._timeout = timedelta()
        self._wakeup = threading.Event()
        self._posted = self._complete = 0
        self._error: str | None = None

    def start_transfer(self, wakeup: threading.Event, seconds: float) -> None:
        """Start a transfer whose completions set `wakeup`."""
        self._wakeup, self._timeout = wakeup, timedelta(seconds=seconds + GRACE_SECONDS)
        self._posted = self._complete = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="webrl-link", daemon=True)
            self._thread.start()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Send a contiguous tensor. Raises RuntimeError when the connection is broken."""
        self._post(self._group.send([tensor], peer, tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Post a receive into a contiguous tensor. Raises RuntimeError when the connection is broken."""
        self._post(self._group.recv([tensor], peer, tag), tensor)

    def completed(self) -> tuple[int, str | None]:
        """Number of completed operations of this transfer, in order, and the error of the next one."""
        return self._complete, self._error

    def close(self) -> None:
        if self._posted > self._complete:
            self._abort()
        if self._thread is not None:
            self._works.put(None)
            self._thread.join(_THREAD_SECONDS)
        self._group = None

    def _post(self, work: Any, tensor: torch.Tensor) -> None:
        self._posted += 1
        self._works.put((work, tensor))  # keeps the memory alive until the operation ends

    def _wait(self) -> None:
        while (item := self._works.get()) is not None:
            try:
                item[0].wait(self._timeout)
            except RuntimeError as error:
                self._error = self._error or error_summary(error)
            else:
                self._complete += 1
            del item
            self._wakeup.set()

    def _abort(self) -> None:
        # Gloo has no abort, but a timed-out wait ends all operations of the group and closes its connections. If the
        # connection to one peer is already broken, the next peer is tried.
        for peer in self._peers:
            try:
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


class NcclChannel:
    """Messages in flight on an NCCL link, in call order on the group's stream."""

    poll_seconds = 0.0005  # between polls

    def __init__(self, group: Any) -> None:
        self._group = group
        self._works: deque[tuple[Any, torch.Tensor]] = deque()
        self._complete = 0

    def start_transfer(self, wakeup: threading.Event, seconds: float) -> None:
        """Start a transfer. NCCL completions are polled and do not set `wakeup`."""
        self._complete = 0

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Send a contiguous tensor after the work of the current stream. Raises RuntimeError."""
        self._works.append((self._group.send([tensor], peer, tag), tensor))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Post a receive into a contiguous tensor after the work of the current stream. Raises RuntimeError."""
        self._works.append((self._group.recv([tensor], peer, tag), tensor))

    def completed(self) -> tuple[int, str | None]:
        """Number of completed operations of this transfer, in order, and the error of the next one."""
        try:
            while self._works and self._works[0][0].is_completed():
                self._works[0][0].wait()  # raises the error of a failed operation
                self._works.popleft()
                self._complete += 1
        except RuntimeError as error:
            return self._complete, error_summary(error)
        return self._complete, None

    def close(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:  # the communicator is lost anyway; the rank and its other links live on
            log.warning("a link's NCCL communicator could not be aborted: %s", error_summary(error))
        self._works.clear()
        self._group = None


def error_summary(error: BaseException) -> str:
    """First line of an error message without source location and generic advice."""
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first_line(error)).split(". This is typically")[0]


def poll_until(ready: Callable[[], bool], seconds: float = math.inf, max_pause: float = 0.05) -> bool:
    """Call `ready` with pauses that double from 1 ms until it returns true; False after `seconds`."""
    polling = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda done: not done),
        wait=tenacity.wait_exponential(multiplier=0.001, max=max_pause),
        stop=tenacity.stop_after_delay(seconds),
        retry_error_callback=lambda _: False,
    )
    return polling(ready)
