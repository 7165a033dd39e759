"""What sessions are measured against: the same calls by bare Playwright, and what the processes below use."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from playwright.async_api import Browser, BrowserContext, CDPSession, Page

from megatron_webrl.browser import settle
from megatron_webrl.browser.chromium import proxy_settings
from megatron_webrl.browser.policy import Endpoint, Policy, declared_endpoints, direct_endpoints
from megatron_webrl.browser.site import Site
from megatron_webrl.config import BrowserConfig

NOWHERE = 1
"""A port where nothing listens: what a site does not declare is out of reach, as it is in a fleet."""

T = TypeVar("T")


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    rounds: int  # in each of which every contestant has its turn
    episodes: int  # of a turn
    steps: int
    seconds: float  # of a slice at full load
    together: int  # contexts at full load
    most: int  # sessions whose memory is measured, at last
    crowd: int  # sessions that wait
    window: float  # seconds for which they are watched
    pace: float  # their waiting times are multiplied with it
    pages: int  # kinds that are captured


FULL = Amount(5, 4, 10, 2.0, 8, most=32, crowd=64, window=45.0, pace=1.0, pages=5)
QUICK = Amount(1, 1, 2, 0.3, 2, most=2, crowd=3, window=0.5, pace=0.02, pages=1)


REST = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Two animation frames: the least after which what a click did is painted."""


class Bare:
    """One context with one page. Clicks, waits for two frames and captures, and nothing else."""

    def __init__(self, context: BrowserContext, page: Page, cdp: CDPSession, settings: BrowserConfig) -> None:
        self.context, self.page = context, page
        self._cdp = cdp
        self._options: dict[str, Any] = {"format": settings.screenshot, "optimizeForSpeed": True}
        if settings.screenshot != "png":
            self._options["quality"] = settings.quality

    @classmethod
    async def open(cls, browser: Browser, settings: BrowserConfig, site: Site) -> Bare:
        """A context as a session on `site` has it, without gateway and listeners."""
        context = await browser.new_context(
            viewport={"width": settings.width, "height": settings.height}, device_scale_factor=1,
            service_workers="block", accept_downloads=False, proxy=proxy_settings(NOWHERE, direct(settings, site)),
        )  # fmt: skip
        await context.add_init_script(settle.STILL_CARET)
        page = await context.new_page()
        return cls(context, page, await context.new_cdp_session(page), settings)

    async def look(self) -> bytes:
        """The encoded screenshot of the page at rest."""
        await self.page.evaluate(REST)
        return await self.capture()

    async def capture(self) -> bytes:
        """The encoded screenshot of the page as it is."""
        return base64.b64decode((await self._cdp.send("Page.captureScreenshot", self._options))["data"])

    async def step(self, x: float, y: float) -> tuple[bytes, Mapping[str, float]]:
        """Click, wait, capture; returns the screenshot and the seconds of each part."""
        started = time.perf_counter()
        await self.page.mouse.click(x, y)
        acted = time.perf_counter()
        await self.page.evaluate(REST)
        rested = time.perf_counter()
        screenshot = await self.capture()
        ended = time.perf_counter()
        return screenshot, {"acting": acted - started, "settling": rested - acted, "capturing": ended - rested}


def direct(settings: BrowserConfig, site: Site) -> dict[Endpoint, Endpoint]:
    """What a fleet on `site` lets Chromium reach past its gateway."""
    return direct_endpoints(declared_endpoints(site.origins, site.addresses), Policy.of(settings))


def turned(contestants: Sequence[T], turn: int) -> list[T]:
    """The contestants in the order of a turn: each is first in some and last in others."""
    start = turn % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def below() -> list[psutil.Process]:
    """The processes that this one has started: driver, Chromium and whatever belongs to them."""
    return psutil.Process().children(recursive=True)


def cpu_seconds() -> float:
    """CPU time of this process and of all below it, those that have ended included."""
    own = psutil.Process().cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for process in below():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def proportional_mib() -> float:
    """Memory of the processes below, MiB; what several share counts once (proportional set size)."""
    kib = 0
    for process in below():
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024
