"""How far judging holds training up: agents act without pause, as in a rollout worker, while verdicts are given.

An episode of an agent is a wait. When all episodes of a group have been acted, the next group takes their agents, as
in rollout/pool.py; the group reaches the trainer with its last verdict. Without judging it would reach the trainer
when it was acted. If judging keeps up, this lag stays constant, and training runs at the same speed, a constant
behind; it is held up by the growth of the lag, and by what judging slows the agents in the same process, compared
with the same agents without verdicts, in another process at the same time. Requests are counted against a budget in
a control service of its own process, as those of a job.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.server import serve
from megatron_webrl.judge.budget import JobUsageMeter, LocalMeter, UsageMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from tools.bench.judge.correctness import ORACLE
from tools.bench.judge.episodes import make_episode
from tools.judge_endpoint.process import endpoint_process, stats_of

BUDGET = BudgetConfig(calls_per_hour=10**9, tokens_per_hour=10**12)  # counted, and never spent
START_SECONDS = 120.0  # of the control service


@dataclass(frozen=True)
class ThroughputSize:
    """What runs. Seconds are of wall clock."""

    agents: int
    group_size: int
    episode_seconds: float  # median of an episode; half to twice of it
    latency: float  # of the endpoint
    screenshots: int
    seconds: float  # in which agents begin groups


@dataclass(frozen=True)
class GroupTimes:
    """Seconds since the begin."""

    begun: float
    acted: float
    judged: float
    planned: float  # acting, without any delay


@dataclass(frozen=True)
class ThroughputResult:
    """Shares are of the time of training."""

    episodes: int
    episodes_per_hour: float
    requests_per_second: float
    most_in_flight: int
    lag_seconds: float  # from the last action of a group to its last verdict, mean
    lag_growth: float  # share of time
    agents_slowed: float  # share of time, beyond the slowness without judging
    slow_without: float  # slowness of the agents without judging: of a busy machine
    held_up: float  # both
    if_agents_waited: float  # share of time, had every agent waited for its verdict


async def _run(size: ThroughputSize, url: str | None, meter: UsageMeter) -> list[GroupTimes]:
    """Run agents, with verdicts of an endpoint, or with those of pages."""
    settings = judge_config(
        evaluators=["judge" if url else "page"], verdict=JudgeModelConfig("oracle", url or ""), timeout_seconds=60,
        concurrency=size.agents,
    )  # fmt: skip
    begin = time.monotonic()
    times: list[GroupTimes] = []
    groups: set[asyncio.Task[None]] = set()

    async def group(ticket: int, acted: asyncio.Event, evaluator: EpisodeEvaluator) -> None:
        begun = time.monotonic() - begin
        lengths = _lengths(ticket, size)
        acting = size.group_size
        last = begun

        async def episode(index: int) -> None:
            nonlocal acting, last
            await asyncio.sleep(lengths[index])
            acting, last = acting - 1, time.monotonic() - begin
            if not acting:
                acted.set()
            await evaluator.evaluate(make_episode(ticket * size.group_size + index, size.screenshots))

        await asyncio.gather(*(episode(index) for index in range(size.group_size)))
        times.append(GroupTimes(begun, last, time.monotonic() - begin, max(lengths)))

    async def agents(first: int, evaluator: EpisodeEvaluator) -> None:
        ticket, step = first, size.agents // size.group_size
        while time.monotonic() - begin < size.seconds:
            acted = asyncio.Event()
            groups.add(asyncio.create_task(group(ticket, acted, evaluator)))
            await acted.wait()
            ticket += step

    async with open_evaluator(settings, meter) as evaluator:
        await asyncio.gather(*(agents(first, evaluator) for first in range(size.agents // size.group_size)))
        await asyncio.gather(*groups)
    return sorted(times, key=lambda each: each.acted)


def _lengths(ticket: int, size: ThroughputSize) -> list[float]:
    rng = random.Random(ticket)
    return [size.episode_seconds * 2 ** rng.uniform(-1, 1) for _ in range(size.group_size)]


def measure_throughput(
    folder: Path, size: ThroughputSize, progress: Callable[[str], None] = lambda line: None
) -> ThroughputResult:
    """Raises RuntimeError."""
    with (
        _control_service(folder) as control,
        endpoint_process(folder, "--oracle", ORACLE, "--latency", f"{size.latency:g}") as url,
        ProcessPoolExecutor(1, get_context("spawn")) as other_process,
    ):
        progress(f"{size.agents} agents, and as many without judging, for {size.seconds:g} s ...")
        without = other_process.submit(_slowness_without, size)
        times = asyncio.run(_run(size, url, JobUsageMeter(control, BUDGET)))
        stats = stats_of(url)
        baseline = without.result()
    return summarise(times, size, baseline, stats["requests"], stats["most_in_flight"])


def _slowness_without(size: ThroughputSize) -> float:
    return slowness(asyncio.run(_run(size, None, LocalMeter(BudgetConfig()))))


@contextmanager
def _control_service(folder: Path) -> Iterator[ControlClient]:
    """A client of a control service in a process of its own, which ends with the block."""
    address = folder / "control.json"
    arguments = ("127.0.0.1", 0, "bench", address, folder / "control.journal")
    process = get_context("spawn").Process(target=serve, args=arguments, daemon=True)
    process.start()
    try:
        yield ControlClient(address, "rollout-0", START_SECONDS)
    finally:
        process.kill()
        process.join()


def slowness(times: Sequence[GroupTimes]) -> float:
    """By which share acting took longer than planned."""
    return sum(each.acted - each.begun for each in times) / sum(each.planned for each in times) - 1


def summarise(
    times: Sequence[GroupTimes], size: ThroughputSize, baseline: float, requests: int, most: int
) -> ThroughputResult:
    """The figures of a run; groups in the order in which they were acted. `baseline`: slowness without judging."""
    lags = [each.judged - each.acted for each in times]
    half = len(times) // 2
    between = _mean([each.acted for each in times[half:]]) - _mean([each.acted for each in times[:half]])
    growth = max(0.0, _mean(lags[half:]) - _mean(lags[:half])) / between if half else 0.0
    slowed = max(0.0, slowness(times) - baseline)
    wall, acting = times[-1].judged, _mean([each.acted - each.begun for each in times])
    episodes = len(times) * size.group_size
    return ThroughputResult(
        episodes=episodes, episodes_per_hour=3600 * episodes / times[-1].acted, requests_per_second=requests / wall,
        most_in_flight=most, lag_seconds=_mean(lags), lag_growth=growth, agents_slowed=slowed,
        slow_without=baseline, held_up=growth + slowed, if_agents_waited=_mean(lags) / (_mean(lags) + acting),
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
