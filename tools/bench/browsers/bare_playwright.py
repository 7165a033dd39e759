"""What sessions are measured against: the same calls by bare Playwright, and what the processes below use."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
from playwright.async_api import Browser, BrowserContext, CDPSession, Page

from megatron_webrl.browser.chromium import proxy_settings
from megatron_webrl.browser.egress.egress_policy import EgressPolicy, Endpoint, declared_endpoints, direct_endpoints
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.process_memory import resident_mib
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import TaskSite

CLOSED_PORT = 1
"""A port where nothing listens: what a site does not declare is out of reach, as it is in a fleet."""

T = TypeVar("T")


@dataclass(frozen=True)
class BrowserBenchSize:
    """How much is measured."""

    rounds: int  # in each of which every contestant has its turn
    episodes: int  # of a turn
    steps: int
    slice_seconds: float  # of a slice at full load
    full_load_contexts: int  # contexts at full load
    max_sessions: int  # sessions whose memory is measured, at last
    waiting_sessions: int  # sessions that wait
    window_seconds: float  # seconds for which they are watched
    wait_scale: float  # their waiting times are multiplied with it
    page_kinds: int  # kinds that are captured


FULL = BrowserBenchSize(
    5, 4, 10, 2.0, 8, max_sessions=32, waiting_sessions=64, window_seconds=45.0, wait_scale=1.0, page_kinds=5
)
QUICK = BrowserBenchSize(
    1, 1, 2, 0.3, 2, max_sessions=2, waiting_sessions=3, window_seconds=0.5, wait_scale=0.02, page_kinds=1
)


TWO_FRAMES_SCRIPT = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Two animation frames: the least after which what a click did is painted."""


class BarePlaywright:
    """One context with one page. Clicks, waits for two frames and captures, and nothing else."""

    def __init__(self, context: BrowserContext, page: Page, cdp: CDPSession, settings: BrowserConfig) -> None:
        self.context, self.page = context, page
        self._cdp = cdp
        self._options: dict[str, Any] = {"format": settings.screenshot, "optimizeForSpeed": True}
        if settings.screenshot != "png":
            self._options["quality"] = settings.quality

    @classmethod
    async def open(cls, browser: Browser, settings: BrowserConfig, site: TaskSite) -> BarePlaywright:
        """A context as a session on `site` has it, without gateway and listeners."""
        context = await browser.new_context(
            viewport={"width": settings.width, "height": settings.height}, device_scale_factor=1,
            service_workers="block", accept_downloads=False,
            proxy=proxy_settings(CLOSED_PORT, proxy_bypass(settings, site)),
        )  # fmt: skip
        await context.add_init_script(settle.DISABLE_CARET_BLINK)
        page = await context.new_page()
        return cls(context, page, await context.new_cdp_session(page), settings)

    async def settled_screenshot(self) -> bytes:
        """The encoded screenshot of the page at rest."""
        await self.page.evaluate(TWO_FRAMES_SCRIPT)
        return await self.screenshot()

    async def screenshot(self) -> bytes:
        """The encoded screenshot of the page as it is."""
        return base64.b64decode((await self._cdp.send("Page.captureScreenshot", self._options))["data"])

    async def step(self, x: float, y: float) -> tuple[bytes, Mapping[str, float]]:
        """Click, wait, capture; returns the screenshot and the seconds of each part."""
        started = time.perf_counter()
        await self.page.mouse.click(x, y)
        acted = time.perf_counter()
        await self.page.evaluate(TWO_FRAMES_SCRIPT)
        rested = time.perf_counter()
        screenshot = await self.screenshot()
        ended = time.perf_counter()
        return screenshot, {"acting": acted - started, "settling": rested - acted, "capturing": ended - rested}


def proxy_bypass(settings: BrowserConfig, site: TaskSite) -> dict[Endpoint, Endpoint]:
    """What a fleet on `site` lets Chromium reach past its gateway."""
    return direct_endpoints(declared_endpoints(site.origins, site.addresses), EgressPolicy.from_config(settings))


def rotated(contestants: Sequence[T], turn: int) -> list[T]:
    """The contestants in the order of a turn: each is first in some and last in others."""
    start = turn % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def child_processes() -> list[psutil.Process]:
    """The processes that this one has started: driver, Chromium and whatever belongs to them."""
    return psutil.Process().children(recursive=True)


def cpu_seconds() -> float:
    """CPU time of this process and of all below it, those that have ended included."""
    own = psutil.Process().cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for process in child_processes():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def proportional_mib() -> float:
    """Memory of the child processes in MiB; memory shared by several counts once (proportional set size)."""
    return resident_mib(process.pid for process in child_processes())
