"""While browsers are killed, every episode is accounted for, memory is stable and nothing is left behind.

The episodes run in a process of their own: python -m tests.browser.test_soak EPISODES SEED PARTS. It prints a report as
JSON: outcomes, kills, memory in MiB after each part of the episodes, and what was left in the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser import browser_pool
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.chromium import resident_mib
from megatron_webrl.browser.errors import BrowserError
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
KILLS = {"browser": 0.05, "driver": 0.01, "renderer": 0.01, "": 0.93}
"""Fraction of the episodes in which one is killed."""

SESSIONS, BROWSERS, MAX_STEPS = 6, 2, 4
STEP_SECONDS = 60.0
IDLE_SECONDS = 120.0  # for the pool to be idle with all contexts prepared


async def play(pool: BrowserPool, task: Task) -> str:
    try:
        async with pool.episode(task) as (session, _):
            for _ in range(MAX_STEPS):
                action = Action("wait", time=0)  # if the page is lost its step raises the error
                with suppress(PlaywrightError, ScriptedPolicyError, TimeoutError):
                    async with asyncio.timeout(STEP_SECONDS):
                        action = await next_scripted_action(session.page, task.environment)
                seen = await session.step(action)
                if seen.done:
                    return "success" if (seen.reward or 0) > 0 else "failure"
        return "steps_exhausted"
    except BrowserError as error:
        return error.outcome


async def kill(kind: str, chance: random.Random, kills: Counter[str]) -> None:
    if not kind:
        return
    await asyncio.sleep(chance.random())  # at any time of an episode, including its reset
    if found := await asyncio.to_thread(browser_pids, kind):
        kills[kind] += 1
        with suppress(ProcessLookupError):
            os.kill(chance.choice(found), signal.SIGKILL)


async def soak(episodes: int, seed: int, parts: int) -> dict[str, Any]:
    """Run `episodes`, SESSIONS at a time, measuring memory after each of `parts`, which are equal."""
    outcomes, kills, memory = Counter[str](), Counter[str](), []
    shared, temporary = set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))
    browser_pool.SESSIONS_PER_BROWSER = SESSIONS // BROWSERS
    with MiniWobTaskSource(ENVIRONMENTS, TasksConfig(max_steps=MAX_STEPS)) as source:
        settings = BrowserConfig(width=160, height=210)
        async with BrowserPool(settings, {"miniwob": source}, SESSIONS, STEP_SECONDS) as pool:

            async def work(indices: Iterator[int]) -> None:
                for index in indices:
                    chance = random.Random(f"{seed}/{index}")
                    [kind] = chance.choices(list(KILLS), list(KILLS.values()))
                    task = source.training_task(seed, index)
                    outcome, _ = await asyncio.gather(play(pool, task), kill(kind, chance, kills))
                    outcomes[outcome] += 1

            def is_idle() -> bool:
                gauges = pool.gauges()
                names = ("sessions_in_use", "browsers", "browsers_draining")
                return [gauges[name] for name in names] == [0, BROWSERS, 0]

            for part in range(parts):
                indices = iter(range(episodes * part // parts, episodes * (part + 1) // parts))
                await asyncio.gather(*(work(indices) for _ in range(SESSIONS)))
                await eventually(is_idle, IDLE_SECONDS)
                gc.collect()
                below = [child.pid for child in psutil.Process().children(recursive=True)]
                memory.append((resident_mib([os.getpid()]), await asyncio.to_thread(resident_mib, below)))
    left = [f"process {name}" for name in child_process.kill_descendants(0.0)]
    left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared if "chrom" in name]
    left += [f"temporary {name}" for name in set(os.listdir(tempfile.gettempdir())) - temporary]
    counts = dataclasses.asdict(pool.counters)
    return {"outcomes": outcomes, "kills": kills, "memory": memory, "counts": counts, "left": left}


def checked(folder: Path, episodes: int, parts: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.browser.test_soak", str(episodes), "0", str(parts)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=seconds, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    outcomes, kills, counts = report["outcomes"], report["kills"], report["counts"]
    assert sum(outcomes.values()) == episodes, outcomes
    # browser_error: the close event of the page arrived long before that of its browser.
    assert set(outcomes) <= {"success", "browser_crashed", "page_crashed", "browser_error"}, outcomes
    # A browser has at most all six sessions; an episode that has not begun gets another session.
    assert outcomes["success"] >= episodes - 6 * sum(kills.values())
    # Two kills may hit the same browser.
    assert 0 < counts["crashes"] <= kills["browser"] + kills.get("driver", 0)
    assert counts["hangs"] == 0
    assert not report["left"]
    return report


@pytest.mark.slow
def test_some_episodes_while_browsers_are_killed(tmp_path: Path) -> None:
    checked(tmp_path, 60, 1, 400)


@pytest.mark.soak
def test_two_thousand_episodes_while_browsers_are_killed(tmp_path: Path) -> None:
    report = checked(tmp_path, 2000, 10, 2800)
    assert report["kills"]["browser"] == pytest.approx(100, abs=4 * math.sqrt(95))
    (own, browsers), *later = report["memory"]
    # The age of the browsers at a measurement is random.
    assert statistics.median(mib for mib, _ in later[-3:]) < 1.2 * own
    assert statistics.median(mib for _, mib in later[-3:]) < 1.2 * browsers


if __name__ == "__main__":
    child_process.become_subreaper()  # so that orphans count as leftovers
    print(json.dumps(asyncio.run(soak(*map(int, sys.argv[1:])))))  # noqa: T201
