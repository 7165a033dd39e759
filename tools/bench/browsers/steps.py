"""Cost of a step, compared with bare Playwright."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict

from playwright.async_api import Browser

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.page.observer import QUALITY, pixels_differ
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import COORDINATE_RANGE, Action
from tools.bench.browsers.bare_playwright import BarePlaywright, BrowserBenchSize, rotated
from tools.bench.browsers.pages import BenchSite
from tools.bench.browsers.report import Measurement, Section, ratio_to

MIN_SPEED_RATIO = 1 / 1.1
"""Of bare Playwright's speed: at most 10 % overhead."""

CLICK_KINDS = {"nothing changes": (700, 700), "the page changes": (100, 100)}  # where to click
PARTS = ("step", "acting", "settling", "capturing")

Samples = dict[str, list[float]]


async def measure_steps(amount: BrowserBenchSize, seed: int) -> Section:
    """Compare clicks of a session and of bare Playwright on the same page of the same Chromium."""
    settings = BrowserConfig()
    with BenchSite(seed) as site:
        async with (
            BrowserPool(settings, {"bench": site}, 1) as pool,
            pool.session() as session,
        ):
            await session.reset(site.task())
            browser = _browser(session)
            bare = await BarePlaywright.open(browser, settings, site)
            await site.open(bare.page, site.task())
            parts, compared = await _in_turn(session, bare, amount)
            await bare.context.close()
    rows = []
    for kind, part in itertools.product(CLICK_KINDS, PARTS):
        own, peer = parts[f"{kind}, session: {part}"], parts[f"{kind}, bare: {part}"]
        ratio = ratio_to(own, peer, "bare", MIN_SPEED_RATIO if part == "step" else None)
        rows.append(Measurement(f"{kind}, {part}: bare Playwright", "ms", tuple(peer)))
        rows.append(Measurement(f"{kind}, {part}: Session", "ms", tuple(own), (ratio,)))
    for kind, values in compared.items():
        rows.append(Measurement(f"{kind}, comparison of pixels, a part of capturing", "ms", tuple(values)))
    return Section(
        "a click, settling, a screenshot",
        {
            "viewport": f"{settings.width}x{settings.height}", "encoding": f"{settings.screenshot} {QUALITY}",
        },
        rows,
        [
            "bare Playwright clicks, waits for two animation frames and captures over CDP with the same encoding, in a "
            "context of the same Chromium; a session also waits for loading, requests, windows and movement, compares "
            "pixels, and reads reward, scroll position and title",
            "a session compares the screenshot with the previous one in a thread; equal bytes are not decoded",
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


def to_pixels(coordinate: tuple[int, int]) -> tuple[float, float]:
    """Pixels of a coordinate in the default viewport."""
    settings = BrowserConfig()
    return coordinate[0] * settings.width / COORDINATE_RANGE, coordinate[1] * settings.height / COORDINATE_RANGE


def _browser(session: Session) -> Browser:
    browser = session.page.context.browser
    if browser is None:
        raise RuntimeError("the session's context has no browser")
    return browser
