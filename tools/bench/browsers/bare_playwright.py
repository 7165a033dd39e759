"""Baseline of the browser benchmark: the same calls by bare Playwright; resource use of child processes."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
from playwright.async_api import Browser, BrowserContext, CDPSession, Page

from megatron_webrl.browser.chromium import proxy_settings
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.page.observer import QUALITY
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import TaskSite

CLOSED_PORT = 1
"""A port without a listener: addresses that a site does not declare are unreachable, as in a pool."""

T = TypeVar("T")


@dataclass(frozen=True)
class BrowserBenchSize:
    """Amount of work of the benchmark."""

    rounds: int  # every contestant has one turn in each
    episodes: int  # per turn
    steps: int


FULL = BrowserBenchSize(rounds=5, episodes=4, steps=10)
QUICK = BrowserBenchSize(rounds=1, episodes=1, steps=2)


TWO_FRAMES_SCRIPT = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Two animation frames: the least time until the effect of a click is painted."""


class BarePlaywright:
    """One context with one page. Only clicks, waits for two frames and captures."""

    def __init__(self, context: BrowserContext, page: Page, cdp: CDPSession, settings: BrowserConfig) -> None:
        self.context, self.page = context, page
        self._cdp = cdp
        self._options: dict[str, Any] = {"format": settings.screenshot, "optimizeForSpeed": True}
        if settings.screenshot != "png":
            self._options["quality"] = QUALITY

    @classmethod
    async def open(cls, browser: Browser, settings: BrowserConfig, site: TaskSite) -> BarePlaywright:
        """Open a context with the settings of a session on `site`, without egress proxy and listeners."""
        context = await browser.new_context(
            viewport={"width": settings.width, "height": settings.height}, device_scale_factor=1,
            service_workers="block", accept_downloads=False,
            proxy=proxy_settings(server_port(site)),
        )  # fmt: skip
        await context.add_init_script(settle.DISABLE_CARET_BLINK)
        page = await context.new_page()
        return cls(context, page, await context.new_cdp_session(page), settings)

    async def settled_screenshot(self) -> bytes:
        """Wait for two frames and return the encoded screenshot."""
        await self.page.evaluate(TWO_FRAMES_SCRIPT)
        return await self._screenshot()

    async def _screenshot(self) -> bytes:
        return base64.b64decode((await self._cdp.send("Page.captureScreenshot", self._options))["data"])

    async def step(self, x: float, y: float) -> tuple[bytes, Mapping[str, float]]:
        """Click, wait and capture; return the screenshot and the seconds of each part."""
        started = time.perf_counter()
        await self.page.mouse.click(x, y)
        acted = time.perf_counter()
        await self.page.evaluate(TWO_FRAMES_SCRIPT)
        settled = time.perf_counter()
        screenshot = await self._screenshot()
        ended = time.perf_counter()
        return screenshot, {"acting": acted - started, "settling": settled - acted, "capturing": ended - settled}


def server_port(site: TaskSite) -> int:
    """The port of the one local server of `site`; as its context's proxy it gets the requests for its own origin."""
    (address,) = site.addresses.values()
    return int(address.rpartition(":")[2])


def rotated(contestants: Sequence[T], turn: int) -> list[T]:
    """The contestants rotated by the number of the turn, so that none is always first."""
    start = turn % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def cpu_seconds() -> float:
    """CPU seconds of this process and of its descendants, ended ones included."""
    own = psutil.Process().cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for process in psutil.Process().children(recursive=True):  # the driver and Chromium
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
