"""Link: a separate process group of the trainer ranks that send to an engine and the engine's ranks.

It carries only point-to-point operations. The link's store holds the control state: members, announced and completed
transfers, and the error of the first failed rank.
"""

from __future__ import annotations

import math
import os
import queue
import re
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import tenacity
import torch
import torch.distributed as dist

from megatron_webrl.system.text import first_line

JOIN_POLL_SECONDS = 0.01
_GRACE_SECONDS = 10.0  # gloo's own timeout exceeds the transfer's by this, so the transfer's always fires first
_REFUSED = "refused"  # key
_ABORT_TAG = 2**31 - 1
_THREAD_SECONDS = 5.0


class TransferError(RuntimeError):
    """A transfer or a link failed. The link is closed; received weights may be incomplete."""


@dataclass
class TransferLink:
    """A joined link. After a failure it is closed and every further use raises TransferError.

    Link ranks: the trainer ranks that send to the engine, in ascending order, then the engine's ranks 0..n-1.
    """

    name: str
    rank: int
    size: int
    timeout_seconds: float  # timeout of joining
    device: torch.device  # device of the messages
    store: Any  # torch.distributed.Store with a prefix
    process_group: Any
    channel: GlooChannel | NcclChannel
    member_names: list[str] = field(default_factory=list)  # "host:pid" by rank
    last_completed: int = -1  # number of the last transfer that this rank completed
    staging_buffers: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot, kept between transfers
    close_reason: str | None = None

    def describe_rank(self, rank: int) -> str:
        """Rank with its host and process id, for messages."""
        return f"rank {rank} ({self.member_names[rank]})"

    def first_failure(self) -> str | None:
        """Error of the first failed rank, if any. Raises RuntimeError when the store does not answer."""
        return self.store.get("failed").decode() if self.store.check(["failed"]) else None

    def fail(self, reason: str) -> TransferError:
        """Publish this rank's error in the store and close the link; the returned error names the first failure."""
        own_error = f"{self.describe_rank(self.rank)}: {reason}"
        text = f"link {self.name} failed on {own_error}"
        try:
            first = self.store.compare_set("failed", "", own_error).decode()
            if first != own_error:
                text += f"; first to fail was {first}"
        except RuntimeError as error:
            text += f"; the store did not answer either: {error_summary(error)}"
        self.close(text)
        return TransferError(text)

    def close(self, reason: str = "it was closed") -> None:
        """Leave the link; operations in flight fail here and at the peers. Idempotent."""
        if self.process_group is not None:
            self.process_group = None
            self.channel.close()
            self.staging_buffers.clear()
        self.close_reason = self.close_reason or reason


def join_link(
    store: dist.Store, name: str, rank: int, size: int, timeout_seconds: float, backend: Literal["gloo", "nccl"]
) -> TransferLink:
    """Form the link `name` of `size` ranks; blocks until all have joined. A restarted engine needs a new name.

    Raises TransferError naming ranks that did not join within `timeout_seconds`, or at once if an engine rejects it.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside 0..{size - 1} (link {name})")
    scoped = dist.PrefixStore(f"link/{name}", store)
    scoped.set(f"done/{rank}", "-1")  # last completed transfer
    scoped.set(f"member/{rank}", f"{socket.gethostname()}:{os.getpid()}")
    missing = _missing_keys(scoped, [f"member/{other}" for other in range(size)], timeout_seconds)
    if missing and scoped.check([_REFUSED]):
        raise TransferError(f"link {name} was refused: {scoped.get(_REFUSED).decode()}")
    if missing:
        ranks = ", ".join(key.rpartition("/")[2] for key in missing)
        raise TransferError(f"link {name}: rank {ranks} of {size} did not join within {timeout_seconds:g} s")
    members = [scoped.get(f"member/{other}").decode() for other in range(size)]
    pg: Any
    channel: GlooChannel | NcclChannel
    try:
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            pg = _nccl(scoped, rank, size, timeout_seconds, device)
            channel = NcclChannel(pg)
        else:
            device = torch.device("cpu")
            pg = dist.ProcessGroupGloo(dist.PrefixStore("gloo", scoped), rank, size, timedelta(seconds=timeout_seconds))
            channel = GlooChannel(pg, [other for other in range(size) if other != rank])
    except RuntimeError as error:
        raise TransferError(
            f"link {name}: rank {rank} could not connect to {', '.join(members)}: {error_summary(error)}"
        ) from error
    return TransferLink(name, rank, size, timeout_seconds, device, scoped, pg, channel, members)


def reject_link(store: dist.Store, name: str, reason: str) -> None:
    """Publish why this rank will not join link `name`."""
    dist.PrefixStore(f"link/{name}", store).set(_REFUSED, reason)


def _nccl(store: Any, rank: int, size: int, seconds: float, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    # By default torch ends the process when a peer dies or times out; here only the link may fail.
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(variable)
    os.environ[variable] = "0"
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
    # One communicator for the whole link: pairs would create theirs later, and a dead peer would block all links here.
    group.eager_connect_single_device(device)
    return group


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
        self._wakeup, self._timeout = wakeup, timedelta(seconds=seconds + _GRACE_SECONDS)
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
        self._group.abort()
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


def _missing_keys(store: Any, keys: list[str], seconds: float) -> list[str]:
    """Wait for keys of the store; returns those missing after `seconds` or when a rank rejects the link."""
    poll_until(lambda: store.check(keys) or store.check([_REFUSED]), seconds, JOIN_POLL_SECONDS)
    return [] if store.check(keys) else [key for key in keys if not store.check([key])]
