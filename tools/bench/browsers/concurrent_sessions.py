"""Concurrent sessions: memory per session, and throughput of free-running and synchronised schedules."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import LatencyConfig, TasksConfig
from megatron_webrl.tasks.latency import MAX_DELAY_SECONDS
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource
from megatron_webrl.types import Task
from tools.bench.browsers.bare_playwright import BrowserBenchSize, cpu_seconds, proportional_mib
from tools.bench.browsers.report import Measurement, Ratio, Section

STEADY_SECONDS = 10.0  # limit for memory to become stable
MAX_STEPS = 40  # per episode; the scripts of easy and medium tasks need at most 10
WIDTH, HEIGHT = 640, 480  # pixels; small, so that two cores are not the bottleneck
SITE_LATENCY = LatencyConfig(median_seconds=1.0, sigma=1.0)
POLICY_MEDIAN, POLICY_SIGMA, POLICY_LIMIT = 6.0, 0.8, 60.0  # seconds, log-normal
GOAL = 5.0
BOOTSTRAP_DRAWS = 2000


async def measure_memory(amount: BrowserBenchSize, seed: int) -> Section:
    """Measure the proportional set size of driver and Chromium by number of sessions, each with its own page."""
    points: list[tuple[int, float]] = []
    sizes = [2**power for power in range(amount.max_sessions.bit_length())]
    with SiteTaskSource(list(ENVIRONMENTS), TasksConfig(max_steps=MAX_STEPS)) as source:
        for repeat in range(min(amount.rounds, 2)):
            async with (
                BrowserPool(BrowserConfig(), {"sites": source}, amount.max_sessions) as pool,
                AsyncExitStack() as stack,
            ):
                for number in range(amount.max_sessions):
                    session = await stack.enter_async_context(pool.session())
                    await session.reset(source.training_task(seed, repeat * amount.max_sessions + number))
                    if number + 1 in sizes:
                        points.append((number + 1, await _steady_mib()))
    slope, base = np.polyfit([number for number, _ in points], [mib for _, mib in points], 1)
    settings = BrowserConfig()
    return Section(
        "memory of driver and Chromium, shared memory counted once",
        {
            "viewport": f"{settings.width}x{settings.height}",
            "sessions": " ".join(map(str, sizes)),
            "pages": "the sites'",
        },
        [
            Measurement("sessions per GiB, without the base", "sessions", (1024 / slope,)),
            Measurement("each session", "MiB", (float(slope),)),
            Measurement("base: Chromium, driver, warm contexts", "MiB", (float(base),)),
            *(
                Measurement(
                    f"with {size} session" + "s" * (size > 1),
                    "MiB",
                    tuple(mib for number, mib in points if number == size),
                )
                for size in (sizes[0], sizes[-1])
            ),
        ],
        [
            f"base and session: line fit; a pool for {amount.max_sessions} sessions keeps some contexts warm, "
            "part of the base"
        ],
        {"points": points, "line": [float(base), float(slope)]},
    )


async def _steady_mib() -> float:
    """Memory once two readings half a second apart agree within 1 %."""
    last, end = proportional_mib(), time.perf_counter() + STEADY_SECONDS
    while time.perf_counter() < end:
        await asyncio.sleep(0.5)
        mib = proportional_mib()
        if abs(mib - last) < 0.01 * mib:
            return mib
        last = mib
    return last


class ScriptedSession:
    """Runs one episode after another with a scripted policy that waits before each answer."""

    def __init__(
        self, number: int, pool: BrowserPool, source: SiteTaskSource, tasks: Iterator[Task], seed: int, pace: float
    ) -> None:
        self.done = False
        self._pool, self._source, self._tasks = pool, source, tasks
        self._stack = AsyncExitStack()
        self._random, self._pace = random.Random(f"{seed}/{number}"), pace
        self._session: Session
        self._task: Task

    async def start_episode(self) -> None:
        """Start a new episode."""
        await self.close()
        self._task, self.done = next(self._tasks), False
        self._session = await self._stack.enter_async_context(self._pool.session())
        await self._session.reset(self._task)

    async def step(self) -> None:
        """Wait for the policy, then step; sets `done` at the end of the episode."""
        drawn = self._random.lognormvariate(np.log(POLICY_MEDIAN), POLICY_SIGMA)
        await asyncio.sleep(self._pace * min(drawn, POLICY_LIMIT))
        action = await self._source.demonstrate(self._session.page, self._task)
        seen = await self._session.step(action)
        self.done = seen.done or action.kind == "answer"

    async def close(self) -> None:
        """Return the session to the pool."""
        await self._stack.aclose()


@dataclass
class ScheduleStats:
    """Measurements of one schedule."""

    started: float = field(default_factory=time.perf_counter)
    cpu_start: float = field(default_factory=cpu_seconds)
    step_ends: list[float] = field(default_factory=list)  # seconds from the start
    step_seconds: list[float] = field(default_factory=list)  # from one observation to the next
    seconds: float = 0.0
    cpu: float = 0.0

    async def timed_step(self, session: ScriptedSession) -> None:
        """Time a step, with the reset after the last step of an episode."""
        started = time.perf_counter()
        await session.step()
        self.step_ends.append(time.perf_counter() - self.started)
        if session.done:
            await session.start_episode()
        self.step_seconds.append(time.perf_counter() - started)

    def end(self) -> None:
        """Stop the clock."""
        self.seconds, self.cpu = time.perf_counter() - self.started, cpu_seconds() - self.cpu_start


async def _free(sessions: Sequence[ScriptedSession], seconds: float) -> ScheduleStats:
    """No session waits for another."""
    stats = ScheduleStats()

    async def work(session: ScriptedSession) -> None:
        while True:
            await stats.timed_step(session)

    working = [asyncio.create_task(work(session)) for session in sessions]
    done: set[asyncio.Task[None]] = set()
    while not done and (not stats.step_seconds or time.perf_counter() - stats.started < seconds):
        done, _ = await asyncio.wait(working, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    stats.end()
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    for failed in done:
        failed.result()
    return stats


async def _by_step(sessions: Sequence[ScriptedSession], seconds: float) -> ScheduleStats:
    """All sessions wait for the slowest step, resets included."""
    stats = ScheduleStats()
    while time.perf_counter() - stats.started < seconds:
        await asyncio.gather(*(stats.timed_step(session) for session in sessions))
    stats.end()
    return stats


async def _by_episode(sessions: Sequence[ScriptedSession], seconds: float) -> ScheduleStats:
    """One whole episode per session, with its reset: all wait for the longest."""
    stats = ScheduleStats()

    async def work(session: ScriptedSession) -> None:
        await session.start_episode()
        while not session.done:
            await session.step()
            stats.step_ends.append(time.perf_counter() - stats.started)

    await asyncio.gather(*(work(session) for session in sessions))
    stats.end()
    await asyncio.gather(*(session.start_episode() for session in sessions))  # for the next schedule
    return stats


SCHEDULES: dict[str, Callable[[Sequence[ScriptedSession], float], Awaitable[ScheduleStats]]] = {
    "episode-synchronised": _by_episode,
    "step-synchronised": _by_step,
    "free-running": _free,  # the last one: it leaves steps unfinished
}


async def measure_waiting(amount: BrowserBenchSize, seed: int) -> Section:
    """Measure steps per second of many sessions on slow sites for each schedule."""
    latency = LatencyConfig(
        median_seconds=amount.wait_scale * SITE_LATENCY.median_seconds,
        sigma=SITE_LATENCY.sigma,
    )
    environments = [name for name, found in ENVIRONMENTS.items() if found.difficulty != "hard"]
    settings, stats = BrowserConfig(width=WIDTH, height=HEIGHT), dict[str, ScheduleStats]()
    with SiteTaskSource(environments, TasksConfig(max_steps=MAX_STEPS, latency=latency)) as source:
        async with BrowserPool(settings, {"sites": source}, amount.waiting_sessions) as pool:
            tasks = (source.training_task(seed, ticket) for ticket in itertools.count())
            sessions = [
                ScriptedSession(number, pool, source, tasks, seed, amount.wait_scale)
                for number in range(amount.waiting_sessions)
            ]
            try:
                for name, schedule in SCHEDULES.items():
                    stats[name] = await schedule(sessions, amount.window_seconds)
            finally:
                await asyncio.gather(*(session.close() for session in sessions))
    rates = {name: len(found.step_ends) / found.seconds for name, found in stats.items()}
    cores = os.cpu_count() or 1
    rows = []
    for name, found in stats.items():
        peers = [other for other in SCHEDULES if other not in (name, "free-running")] if name == "free-running" else []
        ratios = tuple(Ratio(p, rates[name] / rates[p], GOAL if p == "step-synchronised" else None) for p in peers)
        rows.append(Measurement(name, "steps/s", (rates[name],), ratios))
        rows.append(
            Measurement(f"{name}: CPU in use, of {cores} cores", "%", (100 * found.cpu / found.seconds / cores,))
        )
    free = stats["free-running"].step_seconds
    rows.append(Measurement("free-running: a step with its waits", "s", tuple(free)))
    slowest = _slowest(free, amount.waiting_sessions, seed)
    lock = amount.waiting_sessions / slowest
    predicted = Ratio("this", rates["free-running"] / lock, GOAL)
    rows.append(
        Measurement("step-synchronised, resampled from the steps of free-running", "steps/s", (lock,), (predicted,))
    )
    return Section(
        f"{amount.waiting_sessions} sessions, slow sites and a slow policy",
        _waiting_settings(settings, latency, amount),
        rows,
        _waiting_notes(amount, slowest),
        {
            name: {"ends": [round(end, 2) for end in found.step_ends], "seconds": found.seconds}
            for name, found in stats.items()
        },
    )


def _slowest(turns: Sequence[float], crowd: int, seed: int) -> float:
    """Mean of the slowest of `crowd` randomly drawn turns."""
    drawn = np.random.default_rng(seed).choice(np.asarray(turns), (BOOTSTRAP_DRAWS, crowd))
    return float(drawn.max(axis=1).mean())


def _waiting_settings(settings: BrowserConfig, latency: LatencyConfig, amount: BrowserBenchSize) -> dict[str, Any]:
    return {
        "sites": f"log-normal, median {latency.median_seconds:g} s, sigma {latency.sigma:g}, limit "
        f"{MAX_DELAY_SECONDS:g} s, for every response",
        "policy": f"log-normal, median {amount.wait_scale * POLICY_MEDIAN:g} s, sigma {POLICY_SIGMA}, limit "
        f"{amount.wait_scale * POLICY_LIMIT:g} s",
        "environments": "the easy and medium ones of the sites, 1 to 10 steps, by their scripts",
        "viewport": f"{settings.width}x{settings.height}",
        "measured": f"{amount.window_seconds:g} s",
    }


def _waiting_notes(amount: BrowserBenchSize, slowest: float) -> list[str]:
    return [
        "free-running: a session continues as soon as its own page and answer are ready, and starts the next episode "
        "after the last step; waiting limits it until the CPU is full",
        "step-synchronised: a step begins when the slowest step before it has ended; an episode's end is followed by a "
        "reset in the same step, and answer and page are awaited together, both in its favour; it waits for the "
        f"slowest of {amount.waiting_sessions}, {slowest:.1f} s by the steps of free-running",
        "episode-synchronised: a batch of one episode per session; all wait for the last one",
    ]
