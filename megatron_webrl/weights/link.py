"""A link of an engine's ranks and the trainer ranks that send to them: a process group of its own, over gloo or NCCL,
or, within one machine, shared memory.

It carries only point-to-point operations, and its failure affects nothing else. Its store, hosted by link rank 0, is
closed with it. The control service holds the link's state: members, completed transfers, and the error of the first
failed rank. Private attributes and variables of torch are those of torch 2.13.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import tenacity
import torch
import torch.distributed as dist

from megatron_webrl.control.connection import Connection
from megatron_webrl.control.group_store import connect_group_store, host_group_store
from megatron_webrl.util.text import first_line
from megatron_webrl.weights.shared_memory import Pipe, SharedMemoryChannel

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0  # a backend's own timeout exceeds the transfer's by this, so the transfer's always fires first
_ABORT_TAG = 2**31 - 1
_THREAD_SECONDS = 5.0


class GlooChannel:
    """Messages in flight on a gloo link, in order for each pair of ranks. A thread waits for them and sets an event.

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

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a contiguous tensor. Raises RuntimeError when the connection is broken."""
        self._post(self._group.send([tensor], peer, 0), tensor)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Post a receive into a contiguous tensor. Raises RuntimeError when the connection is broken."""
        self._post(self._group.recv([tensor], peer, 0), tensor)

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

    def __init__(self, group: Any, stream: int) -> None:
        """`stream`: of the group, from `reserve_stream`."""
        self._group, self._stream = group, stream
        self._works: deque[tuple[Any, torch.Tensor]] = deque()
        self._complete = 0

    def start_transfer(self, wakeup: threading.Event, seconds: float) -> None:
        """Start a transfer. NCCL completions are polled and do not set `wakeup`."""
        self._complete = 0

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a contiguous tensor after the work of the current stream. Raises RuntimeError."""
        self._works.append((self._group.send([tensor], peer, 0), tensor))

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Post a receive into a contiguous tensor after the work of the current stream. Raises RuntimeError."""
        self._works.append((self._group.recv([tensor], peer, 0), tensor))

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
            release_stream(self._stream)
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


Channel = GlooChannel | NcclChannel | SharedMemoryChannel

MAX_CTAS = 4  # of a communicator: a rank of a large trainer has ten of them, each with memory for all of its blocks
CONSTRUCTOR_VARIABLES = {
    # No watchdog thread: it would end the process when a peer dies. Completion tests find errors without it.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


_streams_in_use: set[int] = set()  # by links of this process


def reserve_stream(device: torch.device) -> int:
    """Choose the CUDA stream that the next communicator gets: one that no link of this process has; returns its handle.

    torch gives out a pool of 32 streams in turn, so a link that is made late could get that of another. On one stream a
    stopped engine would block both links, and ranks that interleave their messages differently would wait for each
    other for ever. Raises RuntimeError if links have all streams.
    """
    pool: list[int] = []
    while (stream := torch.cuda.Stream(device).cuda_stream) not in pool:
        pool.append(stream)
    for stream in (*pool[1:], pool[0]):  # the first was given out twice
        if stream not in _streams_in_use:
            _streams_in_use.add(stream)
            return stream
        torch.cuda.Stream(device)  # pass it over
    raise RuntimeError(f"this rank has {len(pool)} links, and torch has no more CUDA streams")


def release_stream(stream: int) -> None:
    """Let another link have the stream of a closed one."""
    _streams_in_use.discard(stream)


def make_nccl_group(
    store: dist.Store, rank: int, size: int, senders: int, timeout_seconds: float, device: torch.device
) -> tuple[Any, int]:
    """Form the group and its communicator, and connect each sender to each receiver.

    Returns the group and its stream; raises RuntimeError. The first `senders` ranks send, the others receive.
    Waits at most `timeout_seconds` if TORCH_NCCL_NONBLOCKING_TIMEOUT does not exceed them: torch reads that variable
    once in a process, before the first collective, so that the launcher and the engine set it.
    """
    torch.cuda.set_device(device)  # of this thread
    deadline = time.monotonic() + timeout_seconds
    options = dist.ProcessGroupNCCL.Options()
    set_link_options(options, timeout_seconds)
    with environment_variables(CONSTRUCTOR_VARIABLES):
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    stream = reserve_stream(device)
    try:
        # One communicator for the whole link: pairs would create theirs later, and a dead peer would block all links.
        group.eager_connect_single_device(device)
        # The communicator connects in the background; its first operation waits for that.
        for start in (
            lambda: group.allreduce([torch.zeros(1, device=device)]),
            lambda: connect_pairs(group, dist.ProcessGroup(store, rank, size), senders, device),
        ):
            work = start()
            if not poll_until(work.is_completed, max(deadline - time.monotonic(), 0.0)):
                raise RuntimeError(f"NCCL did not connect all {size} ranks within {timeout_seconds:g} s")
            work.wait()  # raises the error of a failed operation
    except BaseException:
        group.abort()
        release_stream(stream)
        raise
    return group, stream


def connect_pairs(group: Any, wrapper: Any, senders: int, device: torch.device) -> Any:
    """Start to exchange one element between each sender and receiver; returns the work.

    NCCL connects two ranks at their first message, and torch's send then blocks until the other rank takes part: in a
    transfer a stopped engine would delay all others. `wrapper`: a new ProcessGroup of this rank; only that class has
    torch's coalescing, which lets all pairs connect at once.
    """
    wrapper._register_backend(device, dist.ProcessGroup.BackendType.NCCL, group)
    wrapper._start_coalescing(device)
    if wrapper.rank() < senders:
        for receiver in range(senders, wrapper.size()):
            group.send([torch.zeros(1, device=device)], receiver, 0)
    else:
        for sender in range(senders):
            group.recv([torch.zeros(1, device=device)], sender, 0)
    return wrapper._end_coalescing(device)


def set_link_options(options: Any, timeout_seconds: float) -> None:
    """Set the ProcessGroupNCCL.Options of a link: its timeout, non-blocking creation, few thread blocks."""
    options._timeout = timedelta(seconds=timeout_seconds + GRACE_SECONDS)  # NCCL counts from the enqueue
    options.config.blocking = 0  # else ncclCommInitRank waits for a dead peer for ever
    options.config.max_ctas = MAX_CTAS


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Context with these environment variables; afterwards they are as before. Other threads see the rest unchanged."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


CPU = torch.device("cpu")
JOIN_POLL_SECONDS = 0.01
_REFUSED, _FAILED = "refused", "failed"  # keys
_STORE = "store"  # key of the address of the group's store


class TransferError(RuntimeError):
    """A transfer or a link failed. The link is closed; received weights may be incomplete."""


class LinkFacts:
    """The facts of one link, out of those of the job, so that a member that ends takes none with it. Values are text.

    Methods raise ControlLost, a RuntimeError, if the control service does not answer.
    """

    def __init__(self, control: Connection, name: str) -> None:
        self._control, self._prefix = control, f"link/{name}/"

    def set(self, key: str, value: str) -> None:
        self._run("put", self._prefix + key, value)

    def get(self, key: str) -> str:
        """The value of a key."""
        return str(self.multi_get([key])[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return None not in self.multi_get(keys)

    def multi_get(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys; None for those without one."""
        values: list[Any] = self._run("get", [self._prefix + key for key in keys])
        return values

    def set_first(self, key: str, value: str) -> str:
        """Set a key unless another rank has; returns its value."""
        return str(self._run("put_if_absent", self._prefix + key, value))

    def delete_key(self, key: str) -> None:
        self._run("put", self._prefix + key, None)

    def _run(self, *command: Any) -> Any:
        return self._control.sync([command])["replies"][0]


@dataclass
class TransferLink:
    """A joined link. After a failure it is closed.

    Link ranks: the trainer ranks that send to the engine, in ascending order, then the engine's ranks 0..n-1.
    """

    name: str
    rank: int
    size: int
    timeout_seconds: float  # timeout of joining
    message_device: torch.device
    parameter_device: torch.device  # of this rank; not the messages' if weights travel through the host
    store: LinkFacts
    group_store: Any  # the process group's own torch.distributed.Store; None with shared memory
    process_group: Any  # None once the link is closed
    channel: Channel
    member_names: list[str] = field(default_factory=list)  # "host:pid" by rank
    senders: tuple[int, ...] = (0,)  # trainer ranks, by link rank
    staging_buffers: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot, kept between transfers

    def describe_rank(self, rank: int) -> str:
        """Rank with its host and process id, for messages."""
        return f"rank {rank} ({self.member_names[rank]})"

    def first_failure(self) -> str | None:
        """Error of the first failed rank, if any. Raises RuntimeError when the store does not answer."""
        return self.store.get(_FAILED) if self.store.check([_FAILED]) else None

    def fail(self, reason: str) -> TransferError:
        """Publish this rank's error in the store and close the link; the returned error names the first failure."""
        own_error = f"{self.describe_rank(self.rank)}: {reason}"
        text = f"link {self.name} failed on {own_error}"
        try:
            first = self.store.set_first(_FAILED, own_error)
            if first != own_error:
                text += f"; first to fail was {first}"
        except RuntimeError as error:
            text += f"; the store did not answer either: {error_summary(error)}"
        self.close()
        return TransferError(text)

    def close(self) -> None:
        """Leave the link; operations in flight end here, and at once at the peers with gloo. Idempotent.

        NCCL's peers do not learn of it: they see `fail`, or reach their timeout.
        """
        if self.process_group is not None:
            self.process_group = self.group_store = None
            self.channel.close()
            self.staging_buffers.clear()


def join_link(
    control: Connection,
    name: str,
    rank: int,
    size: int,
    timeout_seconds: float,
    backend: Literal["host", "gloo", "nccl"],
    parameter_device: torch.device = CPU,
    senders: tuple[int, ...] = (0,),
) -> TransferLink:
    """Form the link `name` of `size` ranks, the first of them the trainer ranks `senders`, the others of the engine.

    Blocks until all have joined. A restarted engine needs a new name.

    `control`: of the job. With backend "host" messages are in host memory, wherever this rank's parameters are, and
    pass through shared memory where all ranks are processes of one machine, else through gloo; those of NCCL are on the
    GPU of the parameters, and each sender is connected to each rank of the engine.

    Raises TransferError naming ranks that did not join within `timeout_seconds`, at once if an engine rejects the link
    or another rank fails, and GRACE_SECONDS later if a rank stops after it has joined.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside 0..{size - 1} (link {name})")
    deadline = time.monotonic() + timeout_seconds
    scoped = LinkFacts(control, name)
    own_name = f"{socket.gethostname()}:{os.getpid()}"
    try:
        hosted = None
        if rank == 0:
            service = control.connect()
            hosted, address = host_group_store(service.host, service.port, timeout_seconds + GRACE_SECONDS)
            scoped.set(_STORE, json.dumps(address))
    except (OSError, RuntimeError) as error:
        raise TransferError(f"link {name}: rank 0 ({own_name}) cannot host a store: {error_summary(error)}") from error
    members = _await_members(scoped, name, rank, size, own_name, timeout_seconds)
    seconds = max(deadline - time.monotonic(), GRACE_SECONDS)
    peers = [other for other in range(size) if other != rank]

    def form() -> tuple[Any, Any, Channel]:
        if backend == "host" and (shared := open_shared_memory(scoped, rank, len(senders), members, seconds)):
            return None, shared, shared
        own = hosted or connect_group_store(json.loads(scoped.get(_STORE)), seconds)
        if backend == "nccl":
            group, stream = make_nccl_group(own, rank, size, len(senders), seconds, parameter_device)
            return own, group, NcclChannel(group, stream)
        group = dist.ProcessGroupGloo(own, rank, size, timedelta(seconds=seconds))
        return own, group, GlooChannel(group, peers)

    try:
        group_store, group, channel = _run_limited(form, seconds, lambda: scoped.check([_FAILED]))
    except RuntimeError as error:
        reason = f"rank {rank} ({own_name}) could not connect to {', '.join(members)}: {error_summary(error)}"
        first = scoped.set_first(_FAILED, reason)
        text = f"link {name}: {reason}"
        raise TransferError(text if first == reason else f"{text}; first to fail was {first}") from error
    message_device = parameter_device if backend == "nccl" else CPU
    return TransferLink(
        name, rank, size, timeout_seconds, message_device, parameter_device, scoped, group_store, group, channel,
        members, senders,
    )  # fmt: skip


def open_shared_memory(
    facts: LinkFacts, rank: int, senders: int, members: Sequence[str], seconds: float
) -> SharedMemoryChannel | None:
    """The channel of a link within one machine; None if any rank cannot have it. Raises RuntimeError after `seconds`.

    Each sender names its pipes, and each receiver says whether it could open its own.
    """
    hosts, numbers = zip(*(member.rsplit(":", 1) for member in members), strict=True)
    if len({*hosts}) > 1:
        return None
    processes, receivers = [int(number) for number in numbers], range(senders, len(members))
    pipes: dict[int, Pipe] = {}
    files: list[int] = []
    try:
        if rank < senders:
            tokens: list[int] = []
            with contextlib.suppress(OSError):
                for receiver in receivers:
                    pipes[receiver], file, token = Pipe.create()
                    files.append(file)
                    tokens.append(token)
            facts.set(f"pipes/{rank}", json.dumps(list(zip(files, tokens, strict=True))))
        else:
            offers = [json.loads(text) for text in _await_facts(facts, "pipes", range(senders), seconds)]
            with contextlib.suppress(OSError, IndexError):
                for sender, offer in enumerate(offers):
                    pipes[sender] = Pipe.open(processes[sender], *offer[rank - senders])
            facts.set(f"opened/{rank}", str(len(pipes)))
        if {*_await_facts(facts, "opened", receivers, seconds)} != {str(senders)}:
            log.info("link without shared memory: not all of its processes see each other")
            return None
        return SharedMemoryChannel(pipes, dict(enumerate(processes)), sends=rank < senders)
    except OSError as error:  # a rank has ended
        raise RuntimeError(str(error)) from error
    finally:
        for file in files:
            os.close(file)


def _await_facts(facts: LinkFacts, name: str, ranks: Sequence[int], seconds: float) -> list[str]:
    """The values of a key of several ranks, once all have set theirs. Raises RuntimeError."""
    keys = [f"{name}/{rank}" for rank in ranks]
    if not poll_until(lambda: facts.check(keys), seconds, JOIN_POLL_SECONDS):
        raise RuntimeError(f"a rank did not answer within {seconds:g} s")
    return [str(value) for value in facts.multi_get(keys)]


def reject_link(control: Connection, name: str, reason: str) -> None:
    """Publish why this rank will not join link `name`."""
    LinkFacts(control, name).set(_REFUSED, reason)


def _await_members(
    scoped: LinkFacts, name: str, rank: int, size: int, own_name: str, timeout_seconds: float
) -> list[str]:
    """Announce this rank and wait for the others; returns the names of all by rank. Raises TransferError."""
    scoped.set(f"done/{rank}", "-1")  # last completed transfer
    scoped.set(f"member/{rank}", own_name)
    keys = [f"member/{other}" for other in range(size)]
    poll_until(lambda: scoped.check(keys) or scoped.check([_REFUSED]), timeout_seconds, JOIN_POLL_SECONDS)
    if not scoped.check(keys):
        if scoped.check([_REFUSED]):
            raise TransferError(f"link {name} was refused: {scoped.get(_REFUSED)}")
        ranks = ", ".join(str(other) for other, key in enumerate(keys) if not scoped.check([key]))
        raise TransferError(f"link {name}: rank {ranks} of {size} did not join within {timeout_seconds:g} s")
    return scoped.multi_get(keys)


def _run_limited(make: Callable[[], Any], seconds: float, cancelled: Callable[[], bool]) -> Any:
    """Result of `make`. It runs in a thread, because torch waits for ever for a store whose host is stopped.

    Raises RuntimeError after `seconds` or once `cancelled` returns true; the thread is left behind and its result is
    dropped. Raises the exception of `make`.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(make())
        except Exception as error:  # raised again below
            outcome.append(error)

    threading.Thread(target=run, name="webrl-link-join", daemon=True).start()
    poll_until(lambda: bool(outcome) or cancelled(), seconds, JOIN_POLL_SECONDS)
    if not outcome:
        raise RuntimeError("another rank failed" if cancelled() else f"a rank did not answer within {seconds:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
