"""NCCL's order of operations on the CPU: process groups for the product's own NcclChannel, and ranks that take turns.

As in torch's ProcessGroupNCCL with an eager communicator:
- the operations of a rank run one after another, in call order, on the one stream of its group;
- a send and its receive run when both are at the head of their streams: nothing is buffered;
- coalesced operations start together, and end together;
- completions are polled; `wait` blocks its caller;
- an abort ends the operations of its own rank, and no other rank learns of it.
NCCL may buffer a small message. Its send then completes earlier than here, so that what completes here completes there.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import greenlet
import pytest
import torch

from megatron_webrl.control.state import JobState
from megatron_webrl.weights import link, transport
from megatron_webrl.weights.link import LinkFacts, NcclChannel, TransferLink


class OrderError(AssertionError):
    """Ranks wait for one another for ever, or the two ends of an operation differ."""


@dataclass(eq=False)
class Part:
    """One end of a message."""

    peer: int
    tensor: torch.Tensor
    sends: bool
    matched: bool = False
    ended: bool = False


@dataclass(eq=False)
class Work:
    """An operation of a stream, or several coalesced ones; what torch returns for it."""

    group: Group
    parts: list[Part]
    error: str | None = None

    def is_completed(self) -> bool:
        return self.error is not None or all(part.ended for part in self.parts)

    def wait(self) -> None:
        while not self.is_completed():
            self.group.network.pause(0.01)
        if self.error is not None:
            raise RuntimeError(self.error)


@dataclass(eq=False)
class Stream:
    """Operations that run one after another, of one group unless a test lets two share it."""

    works: deque[Work] = field(default_factory=deque)


class Network:
    """The groups of all ranks of all links."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self.pause = pause
        self.groups: dict[tuple[str, int], Group] = {}
        self.log: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # by link: sender, receiver, elements
        self.moves = 0  # operations posted or ended
        self.error: OrderError | None = None
        self.later: Callable[[Callable[[], None]], None] = lambda run: run()  # when a started message ends
        self._pending: list[Stream] = []
        self._lock = threading.RLock()

    def post(self, work: Work) -> Work:
        with self._lock:
            if work.group.aborted:
                raise RuntimeError("NCCL communicator was aborted")
            self.moves += 1
            work.group.stream.works.append(work)
            held = [each for each in work.group.stream.works if each.group is work.group]
            work.group.most_messages = max(work.group.most_messages, len(held))
            in_flight = sum(part.tensor.nbytes for each in held for part in each.parts)
            work.group.most_bytes = max(work.group.most_bytes, in_flight)
            self._advance(work.group.stream)
        return work

    def abort(self, group: Group) -> None:
        with self._lock:
            group.aborted = True
            for work in [each for each in group.stream.works if each.group is group]:
                work.error = "NCCL communicator was aborted"
                group.stream.works.remove(work)
            self.moves += 1
            self._advance(group.stream)

    def _advance(self, *streams: Stream) -> None:
        """Start what can start at the head of these streams, and of those that this lets continue."""
        running = bool(self._pending)
        self._pending += streams
        while self._pending and not running:
            stream = self._pending[-1]
            for part in stream.works[0].parts if stream.works else ():
                other = None if part.matched else self._other_end(stream.works[0], part)
                if other is not None:
                    self._start(stream.works[0], part, *other)
            if stream.works and stream.works[0].is_completed():
                stream.works.popleft()
            else:
                self._pending.remove(stream)

    def _other_end(self, work: Work, part: Part) -> tuple[Work, Part] | None:
        peer = self.groups.get((work.group.name, part.peer))
        head = peer.stream.works[0] if peer is not None and peer.stream.works else None
        for other in head.parts if head is not None and head.group is peer else ():
            if not other.matched and (other.peer, other.sends) == (work.group.rank, not part.sends):
                assert head is not None
                return head, other
        return None

    def _start(self, work: Work, part: Part, other_work: Work, other: Part) -> None:
        part.matched = other.matched = True
        (source, target) = (part, other) if part.sends else (other, part)
        if (source.tensor.numel(), source.tensor.dtype) != (target.tensor.numel(), target.tensor.dtype):
            self.error = OrderError(f"{_describe(work, part)}, which {_describe(other_work, other, False)}")

        def end() -> None:
            with self._lock:
                if work.error is not None or other_work.error is not None:
                    return  # aborted at one end: the other one does not learn of it
                if self.error is None:
                    target.tensor.copy_(source.tensor)
                part.ended = other.ended = True
                self.moves += 1
                self.log[work.group.name].append((target.peer, source.peer, source.tensor.numel()))
                self._advance(work.group.stream, other_work.group.stream)

        self.later(end)

    def explain(self) -> tuple[bool, str]:
        """Who waits for whom, and whether in a cycle."""
        waits: dict[Stream, tuple[str, Stream | None]] = {}
        for group in self.groups.values():
            for part in group.stream.works[0].parts if group.stream.works else ():
                if not part.ended and group.stream not in waits:
                    work = group.stream.works[0]
                    peer = self.groups.get((work.group.name, part.peer))
                    text = _describe(work, part)
                    if peer is None or not peer.stream.works:
                        waits[group.stream] = f"{text}, which has posted nothing", None
                    else:
                        waits[group.stream] = text, peer.stream
        for first in waits:
            chain, stream = [], first
            while stream is not None and stream not in chain and stream in waits:
                chain.append(stream)
                stream = waits[stream][1]
            if stream in chain:
                return True, "a cycle: " + "; ".join(waits[each][0] for each in chain[chain.index(stream) :])
        return False, "; ".join(text for text, _ in waits.values())


def _describe(work: Work, part: Part, whole: bool = True) -> str:
    verb = "sends {} to" if part.sends else "receives {} from"
    what = f"{verb.format(part.tensor.numel())} rank {part.peer}"
    return f"rank {work.group.rank} of {work.group.name} {what}" if whole else what


class Group:
    """One rank's group of a link, with the methods of torch's ProcessGroupNCCL that the product calls."""

    def __init__(self, network: Network, name: str, rank: int, stream: Stream) -> None:
        self.network, self.name, self.rank, self.stream = network, name, rank, stream
        self.aborted, self.most_messages, self.most_bytes = False, 0, 0  # in flight at a time
        self.coalesced: list[Part] | None = None
        self.connected: set[int] | None = None  # ranks with which a message was coalesced; None: all
        network.groups[name, rank] = self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work | None:
        return self._add(Part(peer, *tensors, sends=True))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work | None:
        return self._add(Part(peer, *tensors, sends=False))

    def _add(self, part: Part) -> Work | None:
        assert part.tensor.is_contiguous()
        if self.coalesced is not None:
            self.coalesced.append(part)
            return None
        if self.connected is not None and part.peer not in self.connected:
            raise OrderError(f"the first message of rank {self.rank} with rank {part.peer} would block its host")
        return self.network.post(Work(self, [part]))

    def abort(self) -> None:
        self.network.abort(self)


def install(patch: pytest.MonkeyPatch, network: Network, streams: int = 0) -> list[SimpleNamespace]:
    """Give this process a torch with NCCL, whose communicators take the streams of a pool in turn, as those of CUDA do.

    `streams`: of the pool of the process; 0: each thread is a process with a pool of its own. Returns the options of
    each group made, with the environment that its constructor has seen.
    """
    of_thread, made = threading.local(), list[SimpleNamespace]()
    of_process = itertools.cycle([Stream() for _ in range(streams)]) if streams else None

    def take_stream() -> Stream:
        if of_process is None and not hasattr(of_thread, "pool"):
            of_thread.pool = itertools.cycle([Stream() for _ in range(32)])
        return next(of_process or of_thread.pool)

    class ProcessGroupNCCL(Group):
        @staticmethod
        def Options() -> SimpleNamespace:
            return SimpleNamespace(_timeout=None, config=SimpleNamespace())

        def __init__(self, store: Any, rank: int, size: int, options: SimpleNamespace) -> None:
            options.environment = dict(os.environ)
            made.append(options)
            super().__init__(network, f"{store.host}:{store.port}", rank, Stream())
            self.size, self.connected = size, set()
            del network.groups[self.name, rank]  # the communicator has yet to be made

        def eager_connect_single_device(self, device: torch.device) -> None:
            self.stream = take_stream()
            network.groups[self.name, self.rank] = self

        def allreduce(self, tensors: list[torch.Tensor]) -> Work:
            """Block the caller, as NCCL does, until each rank has made its communicator."""
            ranks = [(self.name, rank) for rank in range(self.size)]
            deadline = time.monotonic() + float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"])
            while not all(rank in network.groups for rank in ranks):
                if time.monotonic() > deadline:
                    raise RuntimeError("NCCL timeout in: initialization")
                network.pause(0.01)
            others = [rank for rank in range(self.size) if rank != self.rank]
            return network.post(
                Work(self, [Part(peer, tensors[0], sends) for peer in others for sends in (True, False)])
            )

    class ProcessGroup:
        BackendType = SimpleNamespace(NCCL="nccl")
        group: ProcessGroupNCCL

        def __init__(self, store: Any, rank: int, size: int) -> None:
            self.rank, self.size = lambda: rank, lambda: size

        def _register_backend(self, device: torch.device, kind: str, group: ProcessGroupNCCL) -> None:
            assert kind == "nccl"
            self.group = group

        def _start_coalescing(self, device: torch.device) -> None:
            self.group.coalesced = []

        def _end_coalescing(self, device: torch.device) -> Work:
            parts, self.group.coalesced = self.group.coalesced or [], None
            self.group.connected = {part.peer for part in parts}
            return network.post(Work(self.group, parts))

    patch.setattr(link, "dist", SimpleNamespace(ProcessGroupNCCL=ProcessGroupNCCL, ProcessGroup=ProcessGroup))
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=id(take_stream())))
    return made


class Ranks:
    """Ranks that take turns in one thread on a clock of their own, which stands still while a rank computes."""

    def __init__(self, patch: pytest.MonkeyPatch, stalls: bool = False) -> None:
        """`stalls`: whether a test expects that for a time nothing happens."""
        self.now, self.stalls = 0.0, stalls
        self.network, self.control = Network(self.pause), _Control()
        self.results: dict[str, Any] = {}  # of each rank: what it returned or raised
        self._waiting: list[tuple[float, int, Callable[[], Any]]] = []
        self._count, self._hub, self._ranks = 0, greenlet.getcurrent(), list[Any]()
        patch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: self.now))
        event = SimpleNamespace(wait=self.pause, clear=lambda: None, set=lambda: None)  # NCCL's completions set none
        patch.setattr(transport, "threading", SimpleNamespace(Event=lambda: event))
        patch.setattr("tenacity.nap.time", SimpleNamespace(sleep=self.pause))

    def connect(
        self,
        name: str,
        senders: Sequence[int],
        receivers: int,
        device: str = "cpu",
        shared: dict[int, Stream] | None = None,
    ) -> list[TransferLink]:
        """The joined link of each rank. `shared`: streams that a trainer rank has for several links."""
        links, size, on = [], len(senders) + receivers, torch.device(device)
        for rank in range(size):
            stream = (shared or {}).get(senders[rank]) if rank < len(senders) else None
            group, facts = Group(self.network, name, rank, stream or Stream()), LinkFacts(self.control, name)  # type: ignore[arg-type]
            facts.set(f"done/{rank}", "-1")
            names = [f"host:{number}" for number in range(size)]
            channel = NcclChannel(group, 0)
            links.append(
                TransferLink(name, rank, size, 1.0, on, on, facts, None, group, channel, names, tuple(senders))
            )
        return links

    def start(self, name: str, run: Callable[[], Any]) -> None:
        """Add a rank."""

        def record() -> None:
            try:
                self.results[name] = run()
            except Exception as error:
                self.results[name] = error

        self.results[name] = None
        self._ranks.append(
            greenlet.greenlet(record, self._hub)
        )  # a stopped one is not to end when nothing refers to it
        self.at(0.0, self._ranks[-1].switch)

    def at(self, seconds: float, run: Callable[[], Any]) -> None:
        """Call a function, or continue a rank, after this time."""
        self._count += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._count, run))

    def pause(self, seconds: float) -> None:
        """Let other ranks run for this time; of a rank. Infinite: it has stopped."""
        if seconds < math.inf:
            self.at(seconds, greenlet.getcurrent().switch)
        self._hub.switch()

    def run(self, seconds: float = 600.0) -> dict[str, Any]:
        """Run until every rank has ended or stopped; returns the results. Raises OrderError."""
        moves, last = -1, 0.0
        while self._waiting:
            self.now, _, task = heapq.heappop(self._waiting)
            task()
            if self.network.error is not None:
                raise self.network.error
            if self.network.moves != moves:
                moves, last = self.network.moves, self.now
            elif self.now - last > 0.2:
                last, (cycle, text) = self.now, self.network.explain()
                expected = self.stalls or any(group.aborted for group in self.network.groups.values())
                if cycle or (text and not expected):
                    raise OrderError(text)
            assert self.now < seconds, f"ranks still run: {self.results}"
        return self.results


class _Control:
    """The control service without its process."""

    def __init__(self) -> None:
        self.state, self.count = JobState(), 0

    def sync(self, commands: Sequence[Any]) -> dict[str, Any]:
        self.count += 1
        return {"replies": self.state.apply("test", self.count, [list(command) for command in commands])}
