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
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_webrl.checks.gpu import link_ranks
from megatron_webrl.checks.gpu.link_ranks import LinkCase
from megatron_webrl.checks.gpu.request import GpuCheckRequest
from megatron_webrl.checks.gpu.results import CheckResult, at_least, at_most, failed, skipped

SECTION = "links"
ANSWER_SECONDS = 120.0  # limit of the start of a rank and its work
EXIT_SECONDS = 5.0  # for a killed process to disappear
FAULT_SECONDS = 4.0  # limit of a wait for a peer with a fault
SLACK_SECONDS = 20.0  # by which an error may exceed it: gloo's own timeout, and a busy machine
SLOW_FRACTION = 0.5  # of the median of all pairs
HEARTBEAT_SECONDS = 5  # of NCCL's monitor: what it would do to a trainer it does within twice this
ELEMENTS = {"cpu": 2**22, "cuda": 2**28}  # float32 values of a transfer
MESSAGES = 16


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Speed of all pairs in rounds of disjoint pairs, then each fault on the first pair."""
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(HEARTBEAT_SECONDS))
    gpus = torch.cuda.device_count() if request.platform == "cuda" else 0
    devices = [f"cuda:{number}" for number in range(gpus)] if gpus > 1 else ["cpu", "cpu"]
    if request.platform == "cuda" and gpus < 2:
        yield skipped(SECTION, "pairs of GPUs", "this machine shows one GPU; the faults below ran over gloo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    elements = ELEMENTS["cuda" if gpus > 1 else "cpu"]
    case = LinkCase(store.port, "", "", "", elements, elements // MESSAGES, ANSWER_SECONDS)
    yield from _check_speeds(case, devices, request.min_link_gb_per_second)
    observe = 2.0 * HEARTBEAT_SECONDS if gpus > 1 else 0.0
    case = replace(case, sender=devices[0], receiver=devices[1], timeout_seconds=FAULT_SECONDS, observe_seconds=observe)
    for side, other in (("receiver", "sender"), ("sender", "receiver")):
        for verb, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            signals = {f"signal_{side}": int(number), f"signal_{other}": 0}
            yield check_fault(replace(case, name=f"a {side} {verb}", **signals))  # type: ignore[arg-type]
    case = replace(case, name="a receiver killed during creation", join_seconds=FAULT_SECONDS)
    yield _check_death_in_creation(case, store)


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` members, in rounds whose pairs are disjoint (the circle method of a tournament)."""
    members = list(range(count + count % 2))
    rounds = []
    for _ in range(len(members) - 1):
        pairs = [(members[i], members[-1 - i]) for i in range(len(members) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        members = [members[0], members[-1], *members[1:-1]]
    return rounds


def judge_speeds(speeds: dict[str, float], limits: dict[str, float], minimum: float) -> Iterator[CheckResult]:
    """A result for each pair, GB/s: a pair fails below `minimum` or half of the median of all."""
    typical = statistics.median(speeds.values()) if speeds else 0.0
    for pair, speed in speeds.items():
        name, least = f"pair {pair}", max(minimum, SLOW_FRACTION * typical)
        if speed < least:
            note = f"slow: below {least:.3g} GB/s (--min-link-gb-per-second, or half of the median {typical:.3g})"
            yield at_least(SECTION, name, speed, least, "GB/s", note)
        else:
            yield CheckResult(SECTION, name, "passed", speed, limits[pair], "GB/s")


def _check_speeds(case: LinkCase, devices: Sequence[str], minimum: float) -> Iterator[CheckResult]:
    speeds: dict[str, float] = {}
    limits: dict[str, float] = {}
    for pairs in pair_rounds(len(devices)):
        with _processes() as start:
            begun = []
            for pair in pairs:
                label = "-".join(map(str, pair))
                one = replace(case, name=f"pair {label}", sender=devices[pair[0]], receiver=devices[pair[1]])
                begun.append((label, one, start(link_ranks.send, one), start(link_ranks.receive, one)))
            for label, one, sender, receiver in begun:
                sent, received = _answer(sender), _answer(receiver)
                error = _error(sent) or _error(received)
                if error or not (received and received[2]):
                    yield failed(SECTION, f"pair {label}", error or "wrong values arrived")
                    continue
                assert sent is not None
                speeds[label] = 4 * one.elements / sent[0] / 1e9
                limits[label] = _copy_speed(one)
    yield from judge_speeds(speeds, limits, minimum)


def _copy_speed(case: LinkCase) -> float:
    """GB/s of a plain copy from one device of a link to the other."""
    source, target = (torch.ones(case.elements, device=device) for device in (case.sender, case.receiver))
    best = float("inf")
    for _ in range(link_ranks.TRANSFERS):
        started = time.perf_counter()
        target.copy_(source)
        if target.is_cuda:
            torch.cuda.synchronize(target.device)
        best = min(best, time.perf_counter() - started)
    return 4 * case.elements / best / 1e9


def check_fault(case: LinkCase) -> CheckResult:
    """The rank without the fault must report it within the limit; a sender must compute afterwards."""
    with _processes() as start:
        ranks = {"sender": start(link_ranks.send, case), "receiver": start(link_ranks.receive, case)}
        faulty, survivor = ("sender", "receiver") if case.signal_sender else ("receiver", "sender")
        answer = _answer(ranks[survivor])
        number = case.signal_sender or case.signal_receiver
        if not _has_struck(number, ranks[faulty][1]):
            verb = "stopped" if number == signal.SIGSTOP else "killed"
            return failed(SECTION, case.name, f"the {faulty} was not {verb}; the {survivor} said: {_error(answer)}")
        return _judge_survivor(case.name, survivor, answer)


def _has_struck(number: int, process: Any) -> bool:
    """Whether a process was killed or stopped by this signal."""
    if number == signal.SIGSTOP:
        return process.is_alive() and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.join(EXIT_SECONDS)
    return process.exitcode == -number


def _check_death_in_creation(case: LinkCase, store: dist.TCPStore) -> CheckResult:
    """The receiver stands still once it has registered, the sender begins to connect, and the receiver is killed."""
    with _processes() as start:
        receiver = start(link_ranks.receive, case)
        registered = dist.PrefixStore(f"link/{case.name}", store)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not registered.check(["member/1"]) and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(receiver[1].pid, signal.SIGSTOP)
        sender = start(link_ranks.send, case)
        while not registered.check(["member/0"]) and time.monotonic() < deadline:
            time.sleep(0.001)
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
    context.set_forkserver_preload([link_ranks.__name__])
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


def _error(answer: Any) -> str | None:
    return "a rank hangs or died" if answer is None else answer[1]
