"""Cost of a step, compared with bare Playwright, and of a screenshot by format."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from playwright.async_api import Browser

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.page.observer import QUALITY, pixels_differ
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import COORDINATE_RANGE, Action
from tools.bench.browsers.bare_playwright import BarePlaywright, BrowserBenchSize, cpu_seconds, rotated
from tools.bench.browsers.pages import BenchSite
from tools.bench.browsers.report import Measurement, Section, ratio_to

MIN_SPEED_RATIO = 1 / 1.1
"""Of bare Playwright's speed: at most 10 % overhead."""

CLICK_KINDS = {"nothing changes": (700, 700), "the page changes": (100, 100)}  # where to click
PARTS = ("step", "acting", "settling", "capturing")
PAGES = ("empty", "text", "form", "cards", "picture")
FORMATS = {"png": "PNG", "jpeg": "JPEG 80", "webp": "WebP 80"}

Step = Callable[[tuple[int, int]], Awaitable[Any]]
Samples = dict[str, list[float]]


async def measure_steps(amount: BrowserBenchSize, seed: int) -> Section:
    """Compare clicks of a session and of bare Playwright on the same page of the same Chromium."""
    settings = BrowserConfig()
    with BenchSite(seed) as site:
        async with (
            BrowserPool(settings, {"bench": site}, amount.full_load_contexts + 1) as pool,
            pool.session() as session,
        ):
            await session.reset(site.task("box"))
            browser = _browser(session)
            bare = await BarePlaywright.open(browser, settings, site)
            await site.open(bare.page, site.task("box"))
            parts, compared = await _in_turn(session, bare, amount)
            await bare.context.close()
            rates, costs = await _at_full_load(pool, browser, site, settings, amount)
    rows = []
    for kind, part in itertools.product(CLICK_KINDS, PARTS):
        own, peer = parts[f"{kind}, session: {part}"], parts[f"{kind}, bare: {part}"]
        ratio = ratio_to(own, peer, "bare", MIN_SPEED_RATIO if part == "step" else None)
        rows.append(Measurement(f"{kind}, {part}: bare Playwright", "ms", tuple(peer)))
        rows.append(Measurement(f"{kind}, {part}: Session", "ms", tuple(own), (ratio,)))
    for kind, values in compared.items():
        rows.append(Measurement(f"{kind}, comparison of pixels, a part of capturing", "ms", tuple(values)))
    faster = ratio_to(rates["bare"], rates["session"], "bare", MIN_SPEED_RATIO)
    rows.append(Measurement("at full load: bare Playwright", "steps/s", tuple(rates["bare"])))
    rows.append(Measurement("at full load: Session", "steps/s", tuple(rates["session"]), (faster,)))
    cheaper = ratio_to(costs["session"], costs["bare"], "bare")
    rows.append(Measurement("at full load, CPU of a step: bare Playwright", "ms", tuple(costs["bare"])))
    rows.append(Measurement("at full load, CPU of a step: Session", "ms", tuple(costs["session"]), (cheaper,)))
    return Section(
        "a click, settling, a screenshot",
        {
            "viewport": f"{settings.width}x{settings.height}", "encoding": f"{settings.screenshot} {QUALITY}",
            "full load": f"{amount.full_load_contexts} contexts, {amount.rounds} slices of "
            f"{amount.slice_seconds:g} s each",
        },
        rows,
        [
            "bare Playwright clicks, waits for two animation frames and captures over CDP with the same encoding, in a "
            "context of the same Chromium; a session also waits for loading, requests, windows and movement, compares "
            "pixels, and reads reward, scroll position and title",
            "a session compares the screenshot with the previous one in a thread; equal bytes are not decoded",
            "at full load every other click changes the page",
        ],
    )  # fmt: skip


async def _in_turn(session: Session, bare: BarePlaywright, amount: BrowserBenchSize) -> tuple[Samples, Samples]:
    """Milliseconds of each part of a step by kind and contestant, and of pixel comparisons by kind."""
    parts, compared = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    before = await bare.settled_screenshot()
    for turn, kind in itertools.product(range(amount.rounds * amount.steps), CLICK_KINDS):
        for contestant in rotated(("bare", "session"), turn):
            started = time.perf_counter()
            if contestant == "bare":
                screenshot, seconds = await bare.step(*to_pixels(CLICK_KINDS[kind]))
                total = time.perf_counter() - started
                started = time.perf_counter()
                differs = await asyncio.to_thread(pixels_differ, screenshot, before)
                compared[kind].append(1e3 * (time.perf_counter() - started))
                before = screenshot
            else:
                seen = await session.step(Action("left_click", CLICK_KINDS[kind]))
                total = time.perf_counter() - started
                assert seen.seconds is not None
                seconds, differs = vars(seen.seconds), seen.page_changed
            if differs != (kind == "the page changes"):
                raise RuntimeError(f"{kind}: the screenshots of {contestant} contradict that")
            for part, value in {"step": total, **seconds}.items():
                parts[f"{kind}, {contestant}: {part}"].append(1e3 * value)
    return parts, compared


async def _at_full_load(
    pool: BrowserPool, browser: Browser, site: BenchSite, settings: BrowserConfig, amount: BrowserBenchSize
) -> tuple[Samples, Samples]:
    """Steps per second and CPU milliseconds per step of sessions and of as many bare contexts, in turns."""
    openers: dict[str, Callable[[], AbstractAsyncContextManager[Step]]] = {
        "bare": lambda: _bare_step(browser, site, settings),
        "session": lambda: _session_step(pool, site),
    }
    rates, costs = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for turn in range(amount.rounds):
        for contestant in rotated(tuple(openers), turn):
            async with AsyncExitStack() as stack:
                steps = [
                    await stack.enter_async_context(openers[contestant]()) for _ in range(amount.full_load_contexts)
                ]
                started, used = time.perf_counter(), cpu_seconds()
                done = sum(await asyncio.gather(*(_count(step, started + amount.slice_seconds) for step in steps)))
                rates[contestant].append(done / (time.perf_counter() - started))
                costs[contestant].append(1e3 * (cpu_seconds() - used) / done)
    return rates, costs


async def _count(step: Step, end: float) -> int:
    done, clicks = 0, itertools.cycle(CLICK_KINDS.values())
    while time.perf_counter() < end or not done:
        await step(next(clicks))
        done += 1
    return done


@asynccontextmanager
async def _bare_step(browser: Browser, site: BenchSite, settings: BrowserConfig) -> AsyncIterator[Step]:
    bare = await BarePlaywright.open(browser, settings, site)
    await site.open(bare.page, site.task("box"))
    yield lambda click: bare.step(*to_pixels(click))
    await bare.context.close()


@asynccontextmanager
async def _session_step(pool: BrowserPool, site: BenchSite) -> AsyncIterator[Step]:
    async with pool.session() as session:
        await session.reset(site.task("box"))
        yield lambda click: session.step(Action("left_click", click))


async def measure_encoding(amount: BrowserBenchSize, seed: int) -> Section:
    """Measure milliseconds, CPU and bytes of a screenshot by format and kind of page."""
    settings, rows, series = BrowserConfig(), [], []
    with BenchSite(seed) as site:
        async with BrowserPool(settings, {"bench": site}, 1) as pool, pool.session() as session:
            for page in PAGES[-amount.page_kinds :]:
                bares = {
                    name: await BarePlaywright.open(_browser(session), replace(settings, screenshot=name), site)
                    for name in FORMATS
                }
                milliseconds, cost, size = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list), {}
                for name, bare in bares.items():
                    await site.open(bare.page, site.task(page))
                    size[name] = len(await bare.settled_screenshot())
                for turn in range(amount.rounds):
                    for name in rotated(tuple(bares), turn):
                        used = cpu_seconds()
                        for _ in range(amount.steps):
                            started = time.perf_counter()
                            await bares[name].screenshot()
                            milliseconds[name].append(1e3 * (time.perf_counter() - started))
                        cost[name].append(1e3 * (cpu_seconds() - used) / amount.steps)
                for name, bare in bares.items():
                    await bare.context.close()
                    label = f"{page}, {FORMATS[name]}: {size[name] / 1000:.1f} kB"
                    ratio = ratio_to(milliseconds[name], milliseconds["png"], "PNG")
                    rows.append(Measurement(label, "ms", tuple(milliseconds[name]), () if name == "png" else (ratio,)))
                    rows.append(Measurement(f"{page}, {FORMATS[name]}, CPU", "ms", tuple(cost[name])))
                    series.append({"page": page, "format": FORMATS[name], "bytes": size[name], "ms": rows[-2].median})
    return Section(
        "a screenshot of a static page over CDP",
        {"viewport": f"{settings.width}x{settings.height}", "PNG": "optimizeForSpeed", "JPEG and WebP": "quality 80"},
        rows,
        ["the time includes drawing a frame and reading back its pixels"],
        {"captures": series},
    )


def to_pixels(coordinate: tuple[int, int]) -> tuple[float, float]:
    """Pixels of a coordinate in the default viewport."""
    settings = BrowserConfig()
    return coordinate[0] * settings.width / COORDINATE_RANGE, coordinate[1] * settings.height / COORDINATE_RANGE


def _browser(session: Session) -> Browser:
    browser = session.page.context.browser
    if browser is None:
        raise RuntimeError("the session's context has no browser")
    return browser
