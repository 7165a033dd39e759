"""Cost of a fresh episode: a warm context, a new context, and a relaunch of Chromium."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from playwright.async_api import Browser, async_playwright

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.chromium import find_chromium, launch_arguments, use_sandbox
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.types import Action
from tools.bench.browsers.bare_playwright import (
    CLOSED_PORT,
    BarePlaywright,
    BrowserBenchSize,
    cpu_seconds,
    rotated,
)
from tools.bench.browsers.report import Measurement, Section, ratio_to
from tools.bench.browsers.steps import to_pixels

CLICKS = ((600, 800), (700, 800))  # per episode; outside of the task, so that its page does not change
ENVIRONMENTS = ("click-test", "click-button", "click-dialog", "focus-text", "click-tab", "enter-text")
QUANTITIES = ("s to the first screenshot", "s an episode", "CPU s an episode")

RunEpisode = Callable[[str], Awaitable[None]]


async def measure_resets(amount: BrowserBenchSize, seed: int) -> Section:
    """Measure the same episodes in warm contexts, in new contexts, and in a new Chromium each."""
    settings, found = BrowserConfig(), defaultdict[str, list[float]](list)
    unseen: list[float] = []  # CPU seconds of ended browser processes
    with MiniWobTaskSource(ENVIRONMENTS, TasksConfig(max_steps=len(CLICKS))) as source:
        tasks = (source.training_task(seed, ticket) for ticket in itertools.count())
        arguments = launch_arguments(CLOSED_PORT)

        async def launch() -> Browser:
            return await playwright.chromium.launch(
                executable_path=find_chromium(), args=arguments, chromium_sandbox=use_sandbox()
            )

        async def new_context(name: str) -> None:
            await in_browser(shared_browser, name, time.perf_counter())

        async def relaunch(name: str) -> None:
            started = time.perf_counter()
            browser = await launch()
            await in_browser(browser, name, started)
            used = cpu_seconds()
            await browser.close()
            unseen.append(used - cpu_seconds())

        async def in_browser(browser: Browser, name: str, started: float) -> None:
            bare = await BarePlaywright.open(browser, settings, source)
            await source.open(bare.page, next(tasks))
            await bare.settled_screenshot()
            found[f"{QUANTITIES[0]}: {name}"].append(time.perf_counter() - started)
            for click in CLICKS:
                await bare.step(*to_pixels(click))
            await bare.context.close()

        async with async_playwright() as playwright, BrowserPool(settings, {"miniwob": source}, sessions=1) as pool:
            shared_browser = await launch()

            async def warm(name: str) -> None:
                started = time.perf_counter()
                async with pool.session() as session:
                    await session.reset(next(tasks))
                    found[f"{QUANTITIES[0]}: {name}"].append(time.perf_counter() - started)
                    for click in CLICKS:
                        await session.step(Action("left_click", click))

            contestants: dict[str, RunEpisode] = {
                "Pool, warm context": warm,
                "Playwright, new context": new_context,
                "Playwright, relaunch": relaunch,
            }
            await _take_turns(contestants, found, unseen, amount)
            await shared_browser.close()
    return _make_section(found, list(contestants), settings)


def _make_section(found: dict[str, list[float]], contestants: Sequence[str], settings: BrowserConfig) -> Section:
    rows = []
    for quantity, name in itertools.product(QUANTITIES, contestants):
        values, peer = found[f"{quantity}: {name}"], found[f"{quantity}: Playwright, relaunch"]
        ratios = () if values is peer else (ratio_to(values, peer, "relaunch"),)
        rows.append(Measurement(f"{quantity}: {name}", "s", tuple(values), ratios))
    return Section(
        f"an episode of MiniWoB++: a reset and {len(CLICKS)} clicks",
        {"viewport": f"{settings.width}x{settings.height}", "environments": " ".join(ENVIRONMENTS)},
        rows,
        [
            "relaunch starts Chromium for every episode and keeps Playwright's driver, new context keeps both; either "
            "is bare Playwright, without egress proxy, limits, tabs, step messages and reward",
            "episodes follow each other without a pause: closing the old context and preparing the next one takes CPU "
            "from the running episode of the pool",
        ],
    )


async def _take_turns(
    contestants: dict[str, RunEpisode], found: dict[str, list[float]], unseen: list[float], amount: BrowserBenchSize
) -> None:
    for work in contestants.values():
        await work("warm-up")
    for turn in range(amount.rounds):
        for name in rotated(tuple(contestants), turn):
            unseen.clear()
            started, used = time.perf_counter(), cpu_seconds()
            for _ in range(amount.episodes):
                await contestants[name](name)
            found[f"{QUANTITIES[1]}: {name}"].append((time.perf_counter() - started) / amount.episodes)
            found[f"{QUANTITIES[2]}: {name}"].append((cpu_seconds() - used + sum(unseen)) / amount.episodes)
