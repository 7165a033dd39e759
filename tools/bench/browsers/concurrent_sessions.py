"""Many sessions: what memory one takes, and what waiting for each other costs."""

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
from megatron_webrl.config.tasks import LatencyConfig
from megatron_webrl.tasks.sites.catalog import ENVIRONMENTS
from megatron_webrl.tasks.sites.latency import MAX_DELAY_SECONDS
from megatron_webrl.tasks.sites.site_task_source import SiteTaskSource
from megatron_webrl.types import Task
from tools.bench.browsers.bare_playwright import BrowserBenchSize, cpu_seconds, proportional_mib
from tools.bench.browsers.report import Measurement, Ratio, Section

STEADY_SECONDS = 10.0  # for memory to come to rest
MAX_STEPS = 40  # of an episode; the scripts of easy and medium tasks need 10 at most
WIDTH, HEIGHT = 640, 480  # pixels; two cores shall not be what is waited for
SITE_LATENCY = LatencyConfig(median_seconds=1.0, sigma=1.0)
POLICY_MEDIAN, POLICY_SIGMA, POLICY_LIMIT = 6.0, 0.8, 60.0  # seconds, log-normal
GOAL = 5.0
BOOTSTRAP_DRAWS = 2000


async def measure_memory(amount: BrowserBenchSize, seed: int) -> Section:
    """Proportional set size of driver and Chromium with some sessions, each on a page of its own."""
    points: list[tuple[int, float]] = []
    sizes = [2**power for power in range(amount.max_sessions.bit_length())]
    with SiteTaskSource(list(ENVIRONMENTS), MAX_STEPS) as source:
        for repeat in range(min(amount.rounds, 2)):
            async with (
                BrowserPool(BrowserConfig(), {"sites": source}, amount.max_sessions) as fleet,
                AsyncExitStack() as stack,
            ):
                for number in range(amount.max_sessions):
                    session = await stack.enter_async_context(fleet.session())
                    await session.reset(source.training_task(seed, repeat * amount.max_sessions + number))
                    if number + 1 in sizes:
                        points.append((number + 1, await _steady_mib()))
    slope, base = np.polyfit([number for number, _ in points], [mib for _, mib in points], 1)
    settings = BrowserConfig()
    return Section(
        "memory of driver and Chromium, what processes share counted once",
        {
            "viewport": f"{settings.width}x{settings.height}",
            "sessions": " ".join(map(str, sizes)),
            "pages": "the sites'",
        },
        [
            Measurement("sessions a GiB, beyond the first", "sessions", (1024 / slope,)),
            Measurement("a further session", "MiB", (float(slope),)),
            Measurement("without any: Chromium, driver, contexts kept warm", "MiB", (float(base),)),
            *(
                Measurement(f"with {size}", "MiB", tuple(mib for number, mib in points if number == size))
                for size in (sizes[0], sizes[-1])
            ),
        ],
        [
            f"a straight line through all points; a pool for {amount.max_sessions} sessions keeps some contexts warm, "
            "part of the base"
        ],
        {"points": points, "line": [float(base), float(slope)]},
    )


async def _steady_mib() -> float:
    """Memory once two looks half a second apart agree within a hundredth."""
    last, end = proportional_mib(), time.perf_counter() + STEADY_SECONDS
    while time.perf_counter() < end:
        await asyncio.sleep(0.5)
        mib = proportional_mib()
        if abs(mib - last) < 0.01 * mib:
            return mib
        last = mib
    return last


class ScriptedSession:
    """Where one episode after the other is done: a scripted policy that takes its time to answer."""

    def __init__(
        self, number: int, fleet: BrowserPool, source: SiteTaskSource, tasks: Iterator[Task], seed: int, pace: float
    ) -> None:
        self.done = False
        self._fleet, self._source, self._tasks = fleet, source, tasks
        self._stack = AsyncExitStack()
        self._random, self._pace = random.Random(f"{seed}/{number}"), pace
        self._session: Session
        self._task: Task

    async def start_episode(self) -> None:
        """A new episode."""
        await self.close()
        self._task, self.done = next(self._tasks), False
        self._session = await self._stack.enter_async_context(self._fleet.session())
        await self._session.reset(self._task)

    async def step(self) -> None:
        """The policy's answer and the step; sets `over` at the end of the episode."""
        drawn = self._random.lognormvariate(np.log(POLICY_MEDIAN), POLICY_SIGMA)
        await asyncio.sleep(self._pace * min(drawn, POLICY_LIMIT))
        action = await self._source.demonstrate(self._session.page, self._task)
        seen = await self._session.step(action)
        self.done = seen.done or action.kind == "answer"

    async def close(self) -> None:
        """Give the session back."""
        await self._stack.aclose()


@dataclass
class ScheduleStats:
    """What was seen of one way to run the places."""

    started: float = field(default_factory=time.perf_counter)
    cpu_start: float = field(default_factory=cpu_seconds)
    step_ends: list[float] = field(default_factory=list)  # of steps, seconds from the start
    step_seconds: list[float] = field(default_factory=list)  # seconds of a step, from the observation before to its own
    seconds: float = 0.0
    cpu: float = 0.0

    async def timed_step(self, place: ScriptedSession) -> None:
        """A turn of a place, and the reset that follows the end of its episode."""
        started = time.perf_counter()
        await place.step()
        self.step_ends.append(time.perf_counter() - self.started)
        if place.done:
            await place.start_episode()
        self.step_seconds.append(time.perf_counter() - started)

    def end(self) -> None:
        """Stop the clock."""
        self.seconds, self.cpu = time.perf_counter() - self.started, cpu_seconds() - self.cpu_start


async def _free(places: Sequence[ScriptedSession], seconds: float) -> ScheduleStats:
    """Nobody waits for anybody."""
    watched = ScheduleStats()

    async def work(place: ScriptedSession) -> None:
        while True:
            await watched.timed_step(place)

    working = [asyncio.create_task(work(place)) for place in places]
    done: set[asyncio.Task[None]] = set()
    while not done and (not watched.step_seconds or time.perf_counter() - watched.started < seconds):
        done, _ = await asyncio.wait(working, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    watched.end()
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    for failed in done:
        failed.result()
    return watched


async def _by_step(places: Sequence[ScriptedSession], seconds: float) -> ScheduleStats:
    """All wait for the slowest of each step, resets included."""
    watched = ScheduleStats()
    while time.perf_counter() - watched.started < seconds:
        await asyncio.gather(*(watched.timed_step(place) for place in places))
    watched.end()
    return watched


async def _by_episode(places: Sequence[ScriptedSession], seconds: float) -> ScheduleStats:
    """One whole episode each, its reset included: all wait for the longest, however long that takes."""
    watched = ScheduleStats()

    async def work(place: ScriptedSession) -> None:
        await place.start_episode()
        while not place.done:
            await place.step()
            watched.step_ends.append(time.perf_counter() - watched.started)

    await asyncio.gather(*(work(place) for place in places))
    watched.end()
    await asyncio.gather(*(place.start_episode() for place in places))  # for whoever comes next
    return watched


SCHEDULES: dict[str, Callable[[Sequence[ScriptedSession], float], Awaitable[ScheduleStats]]] = {
    "episode-synchronised": _by_episode,
    "step-synchronised": _by_step,
    "free-running": _free,  # the last: it leaves steps unfinished
}


async def measure_waiting(amount: BrowserBenchSize, seed: int) -> Section:
    """Steps a second of many sessions on slow sites: free-running, and waiting for each other."""
    latency = LatencyConfig(
        median_seconds=amount.wait_scale * SITE_LATENCY.median_seconds,
        sigma=SITE_LATENCY.sigma,
    )
    environments = [name for name, found in ENVIRONMENTS.items() if found.difficulty != "hard"]
    settings, watched = BrowserConfig(width=WIDTH, height=HEIGHT), dict[str, ScheduleStats]()
    with SiteTaskSource(environments, MAX_STEPS, latency) as source:
        async with BrowserPool(settings, {"sites": source}, amount.waiting_sessions) as fleet:
            tasks = (source.training_task(seed, ticket) for ticket in itertools.count())
            places = [
                ScriptedSession(number, fleet, source, tasks, seed, amount.wait_scale)
                for number in range(amount.waiting_sessions)
            ]
            try:
                for name, way in SCHEDULES.items():
                    watched[name] = await way(places, amount.window_seconds)
            finally:
                await asyncio.gather(*(place.close() for place in places))
    rates = {name: len(found.step_ends) / found.seconds for name, found in watched.items()}
    cores = os.cpu_count() or 1
    rows = []
    for name, found in watched.items():
        peers = [other for other in SCHEDULES if other not in (name, "free-running")] if name == "free-running" else []
        ratios = tuple(Ratio(p, rates[name] / rates[p], GOAL if p == "step-synchronised" else None) for p in peers)
        rows.append(Measurement(name, "steps/s", (rates[name],), ratios))
        rows.append(
            Measurement(f"{name}: CPU in use, of {cores} cores", "%", (100 * found.cpu / found.seconds / cores,))
        )
    free = watched["free-running"].step_seconds
    rows.append(Measurement("free-running: a step with its waits", "s", tuple(free)))
    slowest = _slowest(free, amount.waiting_sessions, seed)
    lock = amount.waiting_sessions / slowest
    predicted = Ratio("this", rates["free-running"] / lock, GOAL)
    rows.append(
        Measurement("step-synchronised, drawn from the steps of free-running", "steps/s", (lock,), (predicted,))
    )
    return Section(
        f"{amount.waiting_sessions} sessions on sites that answer slowly, and a policy that thinks",
        _waiting_settings(settings, latency, amount),
        rows,
        _waiting_notes(amount, slowest),
        {
            name: {"ends": [round(end, 2) for end in found.step_ends], "seconds": found.seconds}
            for name, found in watched.items()
        },
    )


def _slowest(turns: Sequence[float], crowd: int, seed: int) -> float:
    """Mean of the slowest of `crowd` turns that are drawn at random."""
    drawn = np.random.default_rng(seed).choice(np.asarray(turns), (BOOTSTRAP_DRAWS, crowd))
    return float(drawn.max(axis=1).mean())


def _waiting_settings(settings: BrowserConfig, latency: LatencyConfig, amount: BrowserBenchSize) -> dict[str, Any]:
    return {
        "sites": f"log-normal, median {latency.median_seconds:g} s, sigma {latency.sigma:g}, limit "
        f"{MAX_DELAY_SECONDS:g} s, for every response",
        "policy": f"log-normal, median {amount.wait_scale * POLICY_MEDIAN:g} s, sigma {POLICY_SIGMA}, limit "
        f"{amount.wait_scale * POLICY_LIMIT:g} s",
        "environments": "the sites' easy and medium ones, 1 to 10 steps, by their scripts",
        "viewport": f"{settings.width}x{settings.height}",
        "watched": f"{amount.window_seconds:g} s",
    }


def _waiting_notes(amount: BrowserBenchSize, slowest: float) -> list[str]:
    return [
        "free-running: every session goes on as soon as its own page and answer are there, with the next episode after "
        "the last step; what limits it is waiting while the CPU is not full, and the CPU from then on",
        "step-synchronised: a step begins when the slowest of the step before is done; an episode's end is followed by "
        "a reset in the same step, and answer and page are waited for together, both in its favour; it waits for "
        f"the slowest of {amount.waiting_sessions}, {slowest:.1f} s by the steps of free-running",
        "episode-synchronised: a batch of one episode each, of which the last to end is waited for",
    ]
