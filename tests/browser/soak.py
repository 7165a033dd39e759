"""Many episodes while browsers are killed, in a process of its own: python -m tests.browser.soak EPISODES SEED PARTS.

Prints a report as JSON: outcomes, kills, memory in MiB after some episodes, and what was left in the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser import browser_pool
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.chromium import resident_mib
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.control import child_process
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.tasks.scripted_policies import next_scripted_action
from megatron_webrl.types import Action, Task
from tests.browser.browser_processes import browser_pids
from tests.waiting import eventually

ENVIRONMENTS = ("click-test", "click-test-2", "click-dialog", "click-button", "focus-text", "click-tab", "enter-text")
KILLS = {"browser": 0.05, "driver": 0.01, "renderer": 0.01}
"""Fraction of the episodes in which one is killed."""

SESSIONS, BROWSERS, MAX_STEPS = 6, 2, 4
STEP_SECONDS = 60.0
IDLE_SECONDS = 120.0  # for the pool to be idle with all contexts prepared


@dataclass
class Report:
    """Results. `memory`: (episodes so far, MiB of this process, MiB of its browsers with their drivers)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float, float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Soak:
    """Runs episodes; each one ends in exactly one outcome."""

    def __init__(self, source: MiniWobTaskSource, pool: BrowserPool, seed: int) -> None:
        self.report = Report()
        self._source, self._pool, self._seed = source, pool, seed
        self._began = time.monotonic()

    async def run(self, indices: Iterator[int]) -> None:
        """Run the episodes with these numbers, SESSIONS at a time, and measure once the pool is idle."""

        async def work() -> None:
            for index in indices:
                self.report.outcomes[await self._episode(index)] += 1

        await asyncio.gather(*(work() for _ in range(SESSIONS)))
        await self._measure()

    async def _episode(self, index: int) -> str:
        chance = random.Random(f"{self._seed}/{index}")
        task, draw, share = self._source.training_task(self._seed, index), chance.random(), 0.0
        kill: asyncio.Task[None] | None = None
        for kind, part in KILLS.items():
            if share <= draw < share + part:
                kill = asyncio.ensure_future(self._kill(kind, chance, chance.random()))
            share += part
        try:
            return await self._play(task)
        except BrowserError as error:
            return error.outcome
        finally:
            if kill is not None:
                await kill

    async def _play(self, task: Task) -> str:
        async with self._pool.episode(task) as (session, seen):
            for _ in range(task.max_steps):
                seen = await session.step(await scripted(session, task))
                if seen.done:
                    return "success" if (seen.reward or 0) > 0 else "failure"
        return "steps_exhausted"

    async def _kill(self, kind: str, chance: random.Random, seconds: float) -> None:
        await asyncio.sleep(seconds)  # at any time of an episode, including its reset
        found = await asyncio.to_thread(browser_pids, kind)
        if found:
            self.report.kills[kind] += 1
            with suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)

    async def _measure(self) -> None:
        def is_idle() -> bool:
            gauges = self._pool.gauges()
            return [gauges[name] for name in ("sessions_in_use", "browsers", "browsers_draining")] == [0, BROWSERS, 0]

        await eventually(is_idle, IDLE_SECONDS)
        gc.collect()
        below = [child.pid for child in psutil.Process().children(recursive=True)]
        browsers = await asyncio.to_thread(resident_mib, below)
        episodes = sum(self.report.outcomes.values())
        self.report.memory.append((episodes, round(resident_mib([os.getpid()]), 1), round(browsers, 1)))
        print(f"{time.monotonic() - self._began:.0f} s: {self.report}", file=sys.stderr, flush=True)  # noqa: T201


async def scripted(session: Session, task: Task) -> Action:
    """The scripted action; if the page is lost, a wait action whose step raises the error."""
    try:
        async with asyncio.timeout(STEP_SECONDS):
            return await next_scripted_action(session.page, task.environment)
    except (PlaywrightError, ScriptedPolicyError, TimeoutError):
        return Action("wait", time=0)


async def soak(episodes: int, seed: int, parts: int) -> Report:
    """Run `episodes`, measuring memory after each of `parts`, which are equal."""
    started, shared = time.monotonic(), set(os.listdir("/dev/shm"))
    temporary = set(os.listdir(tempfile.gettempdir()))
    with MiniWobTaskSource(ENVIRONMENTS, TasksConfig(max_steps=MAX_STEPS)) as source:
        settings = BrowserConfig(width=160, height=210)
        browser_pool.SESSIONS_PER_BROWSER = SESSIONS // BROWSERS
        async with BrowserPool(settings, {"miniwob": source}, SESSIONS, STEP_SECONDS) as pool:
            runs = Soak(source, pool, seed)
            bounds = [episodes * part // parts for part in range(parts + 1)]
            for first, last in itertools.pairwise(bounds):
                await runs.run(iter(range(first, last)))
            report = runs.report
            report.counts = dataclasses.asdict(pool.counters)
    report.left = [f"process {name}" for name in child_process.kill_descendants(0.0)]
    report.left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared if "chrom" in name]
    report.left += [f"temporary {name}" for name in set(os.listdir(tempfile.gettempdir())) - temporary]
    report.seconds = round(time.monotonic() - started, 1)
    return report


if __name__ == "__main__":
    child_process.become_subreaper()  # so that orphans count as leftovers
    print(json.dumps(vars(asyncio.run(soak(*map(int, sys.argv[1:]))))))  # noqa: T201
