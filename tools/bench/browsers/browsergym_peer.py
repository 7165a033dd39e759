"""Compare resets and clicks of sessions with BrowserGym, which runs in a Python environment of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.chromium import find_chromium
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.miniwob import HOST, MiniWobTaskSource
from megatron_webrl.types import COORDINATE_RANGE, Action, Task
from tools.bench.browsers.bare_playwright import BrowserBenchSize, rotated
from tools.bench.browsers.report import Measurement, Section, ratio_to
from tools.bench.browsers.resets import ENVIRONMENTS

WIDTH, HEIGHT = 332, 214  # pixels, BrowserGym's viewport for MiniWoB++
CLICKS = ((900, 800), (900, 900))  # outside of the task
EPISODE_SECONDS = 120.0
END_SECONDS = 30.0
GOAL = 3.0
DRIVER = Path(__file__).with_name("browsergym_driver.py")
MISSING_MESSAGE = (
    "BrowserGym is left out. --browsergym-python names the interpreter of an environment that has it, such as "
    "venv/bin/python after `python -m venv venv && venv/bin/pip install browsergym-core browsergym-miniwob`; it uses "
    "the Chromium of this machine"
)

RunEpisode = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends one request to browsergym_driver.py."""


async def measure_browsergym(amount: BrowserBenchSize, seed: int, interpreter: Path) -> Section:
    """Measure BrowserGym with and without its fixed waits, and sessions without and with elements, in turns.

    Raises RuntimeError if BrowserGym fails.
    """
    settings = BrowserConfig(width=WIDTH, height=HEIGHT, screenshot="png")
    found = defaultdict[str, list[float]](list)
    with MiniWobTaskSource(ENVIRONMENTS, TasksConfig(max_steps=len(CLICKS))) as source:
        async with (
            BrowserPool(settings, {"miniwob": source}, 1) as plain,
            BrowserPool(replace(settings, marks=True), {"miniwob": source}, 1) as marked,
            _browsergym(interpreter, f"http://{source.addresses[HOST]}/miniwob/") as (versions, browsergym),
        ):
            contestants: dict[str, Callable[[Task], Awaitable[dict[str, Any]]]] = {
                "Session": lambda task: _session(plain, task),
                "Session with numbered elements": lambda task: _session(marked, task),
                "BrowserGym": lambda task: browsergym(_request(task, waits=True)),
                "BrowserGym without its fixed waits": lambda task: browsergym(_request(task, waits=False)),
            }
            for turn in range(amount.rounds * amount.episodes // 2 + 1):
                for name in rotated(tuple(contestants), turn):
                    figures = await contestants[name](source.training_task(seed, turn))
                    if turn or amount.rounds == 1:  # the first turn of each warms up
                        found[f"reset: {name}"].append(figures["reset"])
                        found[f"step: {name}"] += figures["steps"]
    rows = []
    for quantity, name in itertools.product(("reset", "step"), contestants):
        own = found[f"{quantity}: {name}"]
        ratios = (
            ratio_to(own, found[f"{quantity}: BrowserGym"], "BrowserGym", GOAL),
            ratio_to(own, found[f"{quantity}: BrowserGym without its fixed waits"], "it without waits"),
        )
        rows.append(Measurement(f"{quantity}: {name}", "s", tuple(own), ratios if name.startswith("Session") else ()))
    return Section(
        "the same environments of MiniWoB++ and the same clicks",
        {"viewport": f"{WIDTH}x{HEIGHT}", "environments": " ".join(ENVIRONMENTS), "peer": versions},
        rows,
        [
            "BrowserGym's fixed waits are 0.5 s before an observation and 0.1 s before each call of Playwright's "
            "(slow_mo); it launches two browsers for every reset, and closing them is not timed",
            "BrowserGym observes DOM and accessibility tree along with the screenshot, which a session does with "
            "numbered elements only",
        ],
    )


async def _session(pool: BrowserPool, task: Task) -> dict[str, Any]:
    started, steps = time.perf_counter(), []
    async with pool.session() as session:
        await session.reset(task)
        reset = time.perf_counter() - started
        for click in CLICKS:
            started = time.perf_counter()
            await session.step(Action("left_click", click))
            steps.append(time.perf_counter() - started)
    return {"reset": reset, "steps": steps}


def _request(task: Task, *, waits: bool) -> dict[str, Any]:
    clicks = [(x * WIDTH / COORDINATE_RANGE, y * HEIGHT / COORDINATE_RANGE) for x, y in CLICKS]
    return {"environment": task.environment, "seed": task.seed, "clicks": clicks, "waits": waits}


@asynccontextmanager
async def _browsergym(interpreter: Path, url: str) -> AsyncIterator[tuple[str, RunEpisode]]:
    """Start the driver; yields its versions and a function to run episodes. Raises RuntimeError with its last line."""
    driver = await asyncio.create_subprocess_exec(
        interpreter, DRIVER, find_chromium(), url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert driver.stdin is not None
    assert driver.stderr is not None
    errors = asyncio.create_task(driver.stderr.read())

    async def response() -> dict[str, Any]:
        assert driver.stdout is not None
        async with asyncio.timeout(EPISODE_SECONDS):
            line = await driver.stdout.readline()
            if line:
                return dict(json.loads(line))
            lines = (await errors).decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"BrowserGym in {interpreter} has ended: {lines[-1] if lines else 'no message'}")

    async def run_episode(request: dict[str, Any]) -> dict[str, Any]:
        assert driver.stdin is not None
        driver.stdin.write(json.dumps(request).encode() + b"\n")
        await driver.stdin.drain()
        return await response()

    try:
        yield str((await response())["versions"]), run_episode
        driver.stdin.close()
        async with asyncio.timeout(END_SECONDS):
            await driver.wait()
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
        errors.cancel()
