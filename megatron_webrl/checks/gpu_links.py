"""Section "links": speed between every two GPUs, and what is left of a trainer rank whose peer dies or stands still.

With fewer than two GPUs the links are those of the CPU platform: two processes and gloo.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_webrl.checks.gpu import GpuCheckRequest
from megatron_webrl.checks.node_network import LINK_SECONDS, ExchangeRank, Status, run_ranks
from megatron_webrl.checks.report import CheckResult, at_least, at_most, failed, skipped
from megatron_webrl.util import child_process
from megatron_webrl.weights import transport
from megatron_webrl.weights.slices import Slice, TransferMessage

SECTION = "links"
GROUP_SECONDS = 60.0
ANSWER_SECONDS = 120.0  # limit of the start of a rank and its work
EXIT_SECONDS = 5.0  # for a killed process to disappear
FAULT_SECONDS = 4.0  # limit of a wait for a peer with a fault
SLACK_SECONDS = 20.0  # by which an error may exceed it: gloo's own timeout, and a busy machine
SLOW_FRACTION = 0.5  # of the median of all pairs
HEARTBEAT_SECONDS = 5  # of NCCL's monitor: what it would do to a trainer it does within twice this
BYTES = {"cpu": 2**24, "cuda": 2**30}  # of an all-reduce of a pair
ELEMENTS, MESSAGES = {"cpu": 2**20, "cuda": 2**26}, 16  # float32 values of a transfer with a fault
COPIES = 3  # the fastest counts


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Speed of all pairs in rounds of disjoint pairs, then each fault on the first pair."""
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(HEARTBEAT_SECONDS))
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    gpus = torch.cuda.device_count() if request.platform == "cuda" else 0
    if request.platform == "cuda" and gpus < 2:
        yield skipped(SECTION, "pairs of GPUs", "this machine shows one GPU; the faults below ran over gloo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    cuda = gpus > 1
    yield from _check_speeds(store.port, gpus if cuda else 2, cuda, request.min_link_gib_per_second)
    devices = ("cuda:0", "cuda:1") if cuda else ("cpu", "cpu")
    observe = 2.0 * HEARTBEAT_SECONDS if cuda else 0.0
    case = LinkCase(store.port, "", *devices, ELEMENTS["cuda" if cuda else "cpu"], observe_seconds=observe)
    for side in ("receiver", "sender"):
        for verb, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            yield check_fault(replace(case, name=f"a {side} {verb}", faulty=side, signal=int(number)))
    yield _check_death_in_creation(replace(case, name="a receiver killed during creation", join_seconds=FAULT_SECONDS))


# -- speed ----------------------------------------------------------------------------------------------------------


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` members, in rounds whose pairs are disjoint (the circle method of a tournament)."""
    members = list(range(count + count % 2))
    rounds = []
    for _ in range(len(members) - 1):
        pairs = [(members[i], members[-1 - i]) for i in range(len(members) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        members = [members[0], members[-1], *members[1:-1]]
    return rounds


def _check_speeds(port: int, count: int, cuda: bool, minimum: float) -> Iterator[CheckResult]:
    """All-reduces of pairs of devices, of which there are `count`."""
    speeds, limits, size = dict[str, float](), dict[str, float](), BYTES["cuda" if cuda else "cpu"]
    for pairs in pair_rounds(count):
        places = [(f"{pair[0]}-{pair[1]}", rank, pair[rank]) for pair in pairs for rank in range(2)]
        results = run_ranks(
            [
                ExchangeRank(f"pair.{n}", "127.0.0.1", port, label, rank, 2, LINK_SECONDS, size, n if cuda else None)
                for label, rank, n in places
            ]
        )
        for pair, ends in zip(pairs, zip(results[::2], results[1::2], strict=True), strict=True):
            label = f"{pair[0]}-{pair[1]}"
            if bad := next((end for end in ends if end.status != Status.OK), None):
                yield failed(SECTION, f"pair {label}", bad.message)
                continue
            speeds[label] = min(end.gib_per_second for end in ends)
            limits[label] = _copy_speed(*(f"cuda:{n}" if cuda else "cpu" for n in pair), size=size)
    yield from judge_speeds(speeds, limits, minimum)


def _copy_speed(source: str, target: str, *, size: int) -> float:
    """GiB/s of a plain copy from one device to the other."""
    values, copied = (torch.ones(size // 4, device=device) for device in (source, target))
    best = float("inf")
    for _ in range(COPIES):
        started = time.perf_counter()
        copied.copy_(values)
        if copied.is_cuda:
            torch.cuda.synchronize(copied.device)
        best = min(best, time.perf_counter() - started)
    return size / best / 2**30


def judge_speeds(speeds: dict[str, float], limits: dict[str, float], minimum: float) -> Iterator[CheckResult]:
    """A result for each pair, GiB/s: a pair fails below `minimum` or half of the median of all."""
    typical = statistics.median(speeds.values()) if speeds else 0.0
    for pair, speed in speeds.items():
        name, least = f"pair {pair}", max(minimum, SLOW_FRACTION * typical)
        if speed < least:
            note = f"slow: below {least:.3g} GiB/s (--min-link-gib-per-second, or half of the median {typical:.3g})"
            yield at_least(SECTION, name, speed, least, "GiB/s", note)
        else:
            yield CheckResult(SECTION, name, "passed", speed, limits[pair], "GiB/s")


# -- faults ---------------------------------------------------------------------------------------------------------


class StoreFacts:
    """What a link asks of a job's control service (control/connection.py), from a TCPStore of this machine."""

    def __init__(self, port: int) -> None:
        self.host, self.port = "127.0.0.1", port
        self.store = dist.TCPStore(self.host, port, is_master=False, timeout=timedelta(seconds=GROUP_SECONDS))

    def connect(self) -> StoreFacts:
        """The address of the service."""
        return self

    def sync(self, commands: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Run commands in order; returns their replies."""
        return {"replies": [getattr(self, f"_{name}")(*arguments) for name, *arguments in commands]}

    def _put(self, key: str, value: str | None) -> None:
        if value is None:
            self.store.delete_key(key)
        else:
            self.store.set(key, value)

    def _get(self, keys: Sequence[str]) -> list[str | None]:
        return [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]

    def _put_if_absent(self, key: str, value: str) -> str:
        return self.store.compare_set(key, "", value).decode()


@dataclass(frozen=True)
class LinkCase:
    """A link of a trainer rank that sends and an engine rank that receives one parameter."""

    port: int  # of the store
    name: str
    sender: str  # device
    receiver: str
    elements: int  # of the parameter, float32
    timeout_seconds: float = FAULT_SECONDS  # of each wait in a transfer
    join_seconds: float = GROUP_SECONDS
    faulty: str = ""  # "sender" or "receiver", which sends `signal` to itself after half of the messages
    signal: int = 0
    observe_seconds: float = 0.0  # after a failed transfer, before the sender computes again

    def messages(self) -> list[TransferMessage]:
        """The parameter in messages of equal size."""
        size = self.elements // MESSAGES
        slices = [Slice("weights", (size,), "weights", (i * size,), "weights", (i * size,)) for i in range(MESSAGES)]
        return [TransferMessage(0, 0, (each,), size) for each in slices]

    def staging_bytes(self) -> int:
        return 8 * 4 * self.elements // MESSAGES

    def prepare(self, device: str) -> torch.device:
        """Prepare the process of a rank."""
        child_process.die_with_parent()  # the fork server, which ends with the process of the section
        torch.set_num_threads(1)
        if device.startswith("cuda"):
            # Read once, at the first collective: the limit of the creation of a link.
            os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(self.join_seconds))))
            torch.cuda.set_device(device)
        return torch.device(device)

    @property
    def backend(self) -> str:
        return "nccl" if self.sender.startswith("cuda") else "gloo"

    def join(self, rank: int) -> transport.TransferLink:
        """Join the link. Raises TransferError."""
        facts = StoreFacts(self.port)
        return transport.join_link(facts, self.name, rank, 2, self.join_seconds, self.backend)  # type: ignore[arg-type]

    def strike(self, side: str, messages: int) -> None:
        """Send the signal if this side is the faulty one and has processed half of the messages."""
        if side == self.faulty and messages > MESSAGES // 2:
            os.kill(os.getpid(), self.signal)


def send(connection: Connection, case: LinkCase) -> None:
    """Body of the sender: sends (seconds since it began to join or had joined, error, whether it computes then)."""
    device = case.prepare(case.sender)
    limit = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group(case.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    values, asked = torch.arange(case.elements, dtype=torch.float32, device=device), 0

    def source(name: str) -> torch.Tensor:
        nonlocal asked
        asked += 1
        case.strike("sender", asked)
        return values

    error, started = None, time.monotonic()
    try:
        link = case.join(0)
        started = time.monotonic()
        outgoing = [transport.OutgoingMessages(link, case.messages(), {0: 1})]
        sent = transport.send(outgoing, source, torch.float32, case.staging_bytes(), 1, case.timeout_seconds)
        error = sent[case.name]
        link.close()
    except transport.TransferError as failure:
        error = str(failure)
    seconds = time.monotonic() - started
    time.sleep(case.observe_seconds)
    total = torch.ones(8, device=device)
    dist.all_reduce(total)
    connection.send((seconds, error, bool((total == 1).all())))


def receive(connection: Connection, case: LinkCase) -> None:
    """Body of the receiver: sends (seconds since it began to join or had joined, error, False)."""
    target = _Target(case, case.prepare(case.receiver))
    error, started = None, time.monotonic()
    try:
        link = case.join(1)
        started = time.monotonic()
        transport.receive(link, case.messages(), target, torch.float32, case.staging_bytes(), 1, case.timeout_seconds)
        link.close()
    except transport.TransferError as failure:
        error = str(failure)
    connection.send((time.monotonic() - started, error, False))


class _Target:
    """A WeightTarget of one parameter."""

    def __init__(self, case: LinkCase, device: torch.device) -> None:
        self.case, self.written, self.values = case, 0, torch.empty(case.elements, device=device)

    def tensor(self, parameter: str) -> torch.Tensor:
        return self.values

    def mark_written(self, parameter: str, elements: int) -> None:
        self.written += 1
        self.case.strike("receiver", self.written)


def check_fault(case: LinkCase) -> CheckResult:
    """The rank without the fault must report it within the limit; a sender must compute afterwards."""
    with _processes() as start:
        ranks = {"sender": start(send, case), "receiver": start(receive, case)}
        survivor = "receiver" if case.faulty == "sender" else "sender"
        answer = _answer(ranks[survivor])
        if not _has_struck(case.signal, ranks[case.faulty][1]):
            verb, said = "stopped" if case.signal == signal.SIGSTOP else "killed", answer[1] if answer else "nothing"
            return failed(SECTION, case.name, f"the {case.faulty} was not {verb}; the {survivor} said: {said}")
        return _judge_survivor(case.name, survivor, answer)


def _has_struck(number: int, process: Any) -> bool:
    """Whether a process was killed or stopped by this signal."""
    if number == signal.SIGSTOP:
        return process.is_alive() and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.join(EXIT_SECONDS)
    return process.exitcode == -number


def _check_death_in_creation(case: LinkCase) -> CheckResult:
    """The receiver stands still once it has registered, the sender begins to connect, and the receiver is killed."""
    store = dist.TCPStore("127.0.0.1", case.port, is_master=False, timeout=timedelta(seconds=GROUP_SECONDS))
    registered, deadline = dist.PrefixStore(f"link/{case.name}", store), time.monotonic() + ANSWER_SECONDS

    def wait_for(member: int) -> None:
        while not registered.check([f"member/{member}"]) and time.monotonic() < deadline:
            time.sleep(0.001)

    with _processes() as start:
        receiver = start(receive, case)
        wait_for(1)
        os.kill(receiver[1].pid, signal.SIGSTOP)
        sender = start(send, case)
        wait_for(0)
        time.sleep(0.5)
        os.kill(receiver[1].pid, signal.SIGKILL)
        return _judge_survivor(case.name, "sender", _answer(sender))


def _judge_survivor(name: str, survivor: str, answer: Any) -> CheckResult:
    if answer is None:
        return failed(SECTION, name, f"the {survivor} hangs or died")
    seconds, error, computes = answer
    if not error:
        return failed(SECTION, name, f"the {survivor} noticed nothing")
    if survivor == "sender" and not computes:
        return failed(SECTION, name, f"the sending trainer rank computes no more after: {error}")
    note = f"the trainer lives on: {error}" if survivor == "sender" else error
    return at_most(SECTION, f"{name}: seconds to the error", seconds, FAULT_SECONDS + SLACK_SECONDS, "s", note[:200])


@contextmanager
def _processes() -> Iterator[Any]:
    """start(function, case) -> (connection, process); all are killed at the end."""
    context = multiprocessing.get_context("forkserver")
    running: list[Any] = []

    def start(function: Any, case: LinkCase) -> tuple[Any, Any]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=function, args=(theirs, case), daemon=True)
        process.start()
        theirs.close()
        running.append(process)
        return ours, process

    try:
        yield start
    finally:
        for process in running:
            process.kill()
            process.join(EXIT_SECONDS)


def _answer(rank: tuple[Any, Any]) -> Any:
    """What a rank sent; None if it died or is silent."""
    try:
        return rank[0].recv() if rank[0].poll(ANSWER_SECONDS) else None
    except EOFError:
        return None
