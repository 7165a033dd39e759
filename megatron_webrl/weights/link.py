"""A link: a process group of its own between trainer ranks and one engine's, beside everyone's default group.

Only point-to-point operations go over it. The link's store carries the few words that are not weights: who is
there, which transfer began, who is done, and what the first rank that failed has to say.
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

JOIN_POLL_SECONDS = 0.01
_GRACE_SECONDS = 10.0  # gloo's own limit lies so far beyond a transfer's, which therefore always comes first
_REFUSED = "refused"  # key
_ABORT_TAG = 2**31 - 1
_THREAD_SECONDS = 5.0


class TransferError(RuntimeError):
    """A transfer or a link failed. The link is closed; what was received may be incomplete."""


@dataclass
class TransferLink:
    """A joined link. After a failure it is closed and every further use raises TransferError.

    Link ranks: the trainer ranks that send to the engine, in ascending order, then the engine's ranks 0..n-1.
    """

    name: str
    rank: int
    size: int
    timeout_seconds: float  # limit of joining
    device: torch.device  # where messages live
    store: Any  # torch.distributed.Store, with a prefix of its own
    process_group: Any
    channel: GlooChannel | NcclChannel
    member_names: list[str] = field(default_factory=list)  # "host:pid" by rank
    last_completed: int = -1  # number of the last transfer that this rank completed
    staging_buffers: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # staging by slot, made at need, kept for the next
    close_reason: str | None = None

    def describe_rank(self, rank: int) -> str:
        """A rank with its host and process id."""
        return f"rank {rank} ({self.member_names[rank]})"

    def first_failure(self) -> str | None:
        """What the first rank that failed wrote. Raises RuntimeError when the store does not answer."""
        return self.store.get("failed").decode() if self.store.check(["failed"]) else None

    def fail(self, reason: str) -> TransferError:
        """Say in the store why this rank gives up and close the link; returns an error that tells all that is known."""
        mine = f"{self.describe_rank(self.rank)}: {reason}"
        text = f"link {self.name} failed on {mine}"
        try:
            first = self.store.compare_set("failed", "", mine).decode()
            if first != mine:
                text += f"; first to fail was {first}"
        except RuntimeError as error:
            text += f"; the store did not answer either: {error_summary(error)}"
        self.close(text)
        return TransferError(text)

    def close(self, reason: str = "it was closed") -> None:
        """Leave the link; operations under way end with an error here and at the peers. Idempotent."""
        if self.process_group is not None:
            self.process_group = None
            self.channel.close()
            self.staging_buffers.clear()
        self.close_reason = self.close_reason or reason


def join_link(
    store: dist.Store, name: str, rank: int, size: int, timeout_seconds: float, backend: Literal["gloo", "nccl"]
) -> TransferLink:
    """Form the link `name` of `size` ranks; blocks until all are there.

    A name serves once: an engine that starts again gets a new one. Raises TransferError naming the ranks that
    did not come within `seconds`, or at once with the reason that an engine gave for refusing to come.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside 0..{size - 1} (link {name})")
    prefixed = dist.PrefixStore(f"link/{name}", store)
    prefixed.set(f"done/{rank}", "-1")  # the last transfer that it completed
    prefixed.set(f"member/{rank}", f"{socket.gethostname()}:{os.getpid()}")
    missing = _absent(prefixed, [f"member/{other}" for other in range(size)], timeout_seconds)
    if missing and prefixed.check([_REFUSED]):
        raise TransferError(f"link {name} was refused: {prefixed.get(_REFUSED).decode()}")
    if missing:
        ranks = ", ".join(key.rpartition("/")[2] for key in missing)
        raise TransferError(f"link {name}: rank {ranks} of {size} did not join within {timeout_seconds:g} s")
    members = [prefixed.get(f"member/{other}").decode() for other in range(size)]
    group: Any
    wire: GlooChannel | NcclChannel
    try:
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            group = _nccl(prefixed, rank, size, timeout_seconds, device)
            wire = NcclChannel(group)
        else:
            device = torch.device("cpu")
            group = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", prefixed), rank, size, timedelta(seconds=timeout_seconds)
            )
            wire = GlooChannel(group, [other for other in range(size) if other != rank])
    except RuntimeError as error:
        raise TransferError(
            f"link {name}: rank {rank} could not connect to {', '.join(members)}: {error_summary(error)}"
        ) from error
    return TransferLink(name, rank, size, timeout_seconds, device, prefixed, group, wire, members)


def reject_link(store: dist.Store, name: str, reason: str) -> None:
    """Tell those who wait at link `name` why this rank will not come."""
    dist.PrefixStore(f"link/{name}", store).set(_REFUSED, reason)


def _nccl(store: Any, rank: int, size: int, seconds: float, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    # Torch would end this whole process when a peer dies or is late; here only the link may fail.
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
    # One communicator for the whole link, made here: one for each pair would be made in the middle of a transfer,
    # where a dead peer would hold up every other link of this rank.
    group.eager_connect_single_device(device)
    return group


class GlooChannel:
    """Messages under way on a gloo link, waited for in their order by a thread that rings a bell.

    Gloo's point-to-point works have no test for completion and a wait that runs out breaks the whole group, so
    they cannot be polled; a thread that waits costs nothing and adds no delay.
    """

    poll_seconds = 0.25  # seconds to wait for the bell

    def __init__(self, group: Any, peers: list[int]) -> None:
        self._group, self._peers = group, peers
        self._works: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._limit = timedelta()
        self._bell = threading.Event()
        self._posted = self._complete = 0
        self._error: str | None = None

    def start_transfer(self, wakeup: threading.Event, seconds: float) -> None:
        """Get ready for a transfer whose completions ring `bell`."""
        self._bell, self._limit = wakeup, timedelta(seconds=seconds + _GRACE_SECONDS)
        self._posted = self._complete = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="webrl-link", daemon=True)
            self._thread.start()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Put a contiguous tensor under way. Raises RuntimeError when the connection is broken."""
        self._post(self._group.send([tensor], peer, tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Await a message in a contiguous tensor. Raises RuntimeError when the connection is broken."""
        self._post(self._group.recv([tensor], peer, tag), tensor)

    def completed(self) -> tuple[int, str | None]:
        """How many operations of this transfer are complete, counted in their order; what went wrong with the next."""
        return self._complete, self._error

    def close(self) -> None:
        """End what is under way and let the thread go."""
        if self._posted > self._complete:
            self._abort()
        if self._thread is not None:
            self._works.put(None)
            self._thread.join(_THREAD_SECONDS)
        self._group = None

    def _post(self, work: Any, tensor: torch.Tensor) -> None:
        self._posted += 1
        self._works.put((work, tensor))  # keeps the memory until nothing touches it any more

    def _wait(self) -> None:
        while (item := self._works.get()) is not None:
            try:
                item[0].wait(self._limit)
            except RuntimeError as error:
                self._error = self._error or error_summary(error)
            else:
                self._complete += 1
            del item
            self._bell.set()

    def _abort(self) -> None:
        # Gloo has no abort. A wait that runs out does the same: it ends all operations of the group and closes its
        # connections. Where a connection is broken already, another one does it.
        for peer in self._peers:
            try:
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


class NcclChannel:
    """Messages under way on an NCCL link: one stream of the group's own, in the order of the calls."""

    poll_seconds = 0.0005  # seconds between two looks

    def __init__(self, group: Any) -> None:
        self._group = group
        self._works: deque[tuple[Any, torch.Tensor]] = deque()
        self._complete = 0

    def start_transfer(self, wakeup: threading.Event, seconds: float) -> None:
        """Get ready for a transfer; nobody rings for NCCL, completion is looked for."""
        self._complete = 0

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Put a contiguous tensor under way behind what the current stream does. Raises RuntimeError."""
        self._works.append((self._group.send([tensor], peer, tag), tensor))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Await a message in a contiguous tensor that the current stream is through with. Raises RuntimeError."""
        self._works.append((self._group.recv([tensor], peer, tag), tensor))

    def completed(self) -> tuple[int, str | None]:
        """How many operations of this transfer are complete, counted in their order; what went wrong with the next."""
        try:
            while self._works and self._works[0][0].is_completed():
                self._works[0][0].wait()  # complete: raises what went wrong
                self._works.popleft()
                self._complete += 1
        except RuntimeError as error:
            return self._complete, error_summary(error)
        return self._complete, None

    def close(self) -> None:
        """End what is under way."""
        self._group.abort()
        self._works.clear()
        self._group = None


def error_summary(error: BaseException) -> str:
    """The words of an error without the library's place in its source and advice."""
    lines = str(error).splitlines() or [repr(error)]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", lines[0]).split(". This is typically")[0]


def poll_until(ready: Callable[[], bool], seconds: float = math.inf, max_pause: float = 0.05) -> bool:
    """Call `ready` with pauses that double from 1 ms until it returns true; False after `seconds`."""
    polling = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda done: not done),
        wait=tenacity.wait_exponential(multiplier=0.001, max=max_pause),
        stop=tenacity.stop_after_delay(seconds),
        retry_error_callback=lambda _: False,
    )
    return polling(ready)


def _absent(store: Any, keys: list[str], seconds: float) -> list[str]:
    """Wait until all keys are in the store; returns those that are not after `seconds`, or when somebody refuses."""
    if poll_until(lambda: store.check(keys) or store.check([_REFUSED]), seconds, JOIN_POLL_SECONDS) and store.check(
        keys
    ):
        return []
    return [key for key in keys if not store.check([key])]
