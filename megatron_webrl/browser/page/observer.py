"""Making an observation of the active tab: at rest, with its screenshot, elements and result."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.page.hit_testing import PageTooLarge
from megatron_webrl.browser.page.marks import Marks, find_marks
from megatron_webrl.browser.page.pixels import ScreenshotDigest, draw_marks
from megatron_webrl.browser.page.step_messages import StepMessages
from megatron_webrl.browser.page.tab import Tab, is_document_replaced
from megatron_webrl.browser.page.tabs import Tabs
from megatron_webrl.browser.task_page import TaskPage
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Observation, StepSeconds, Task

MARK_ATTEMPTS = 3
"""A page that is replaced so often while its elements are listed is shown without numbers."""

OBSERVE_ATTEMPTS = 10
"""A page that is replaced so often while it is looked at cannot be seen."""

T = TypeVar("T")


class PageObserver:
    """Sees what the agent is shown. `marks` are the elements of the latest observation."""

    def __init__(self, tabs: Tabs, settings: BrowserConfig, notes: StepMessages, access: NetworkAccess) -> None:
        self.marks: Marks | None = None
        self._tabs, self._settings, self._notes, self._access = tabs, settings, notes, access
        self._picture: ScreenshotDigest | None = None  # the latest, without numbers

    async def reset(self) -> None:
        """Compare with nothing seen so far."""
        self._picture = None
        await self._drop_marks()

    async def observe(self, site: TaskPage, task: Task, seconds_acting: float, instruction: str | None) -> Observation:
        """Wait until the page is at rest and look at it. Raises PlaywrightError if it is lost."""
        started = time.monotonic()
        until = asyncio.get_running_loop().time() + settle.SETTLE_SECONDS
        rest = await self._rest(until)
        rested = time.monotonic()
        if self._settings.marks:
            rest = await self._mark(rest, until)
        tab = self._tabs.active
        screenshot, (reward, done) = await asyncio.gather(
            retry_if_replaced(lambda: self._capture(tab)), retry_if_replaced(lambda: site.result(tab.page, task))
        )
        before, self._picture = self._picture, ScreenshotDigest(screenshot)
        changed = before is not None and await asyncio.to_thread(self._picture.differs, before)
        elements = self.marks.elements if self.marks else None
        if elements is not None:
            settings = self._settings
            screenshot = await asyncio.to_thread(
                draw_marks, screenshot, elements, settings.screenshot, settings.quality
            )
        tabs = await self._tabs.list_tabs(rest.title, rest.url)
        if rest.url.startswith("chrome-error:"):
            self._notes.add("the page cannot be reached")
        for sentence in self._access.take_errors(rest.url):
            self._notes.add(sentence)
        if rest.loading:
            self._notes.add("the page is still loading")
        seconds = StepSeconds(seconds_acting, rested - started, time.monotonic() - rested)
        return Observation(
            screenshot=screenshot, url=rest.url, title=rest.title, page_changed=changed, instruction=instruction,
            error=self._notes.pop_text(), reward=reward, done=done, elements=elements, tabs=tabs, scroll=rest.scroll,
            seconds=seconds,
        )  # fmt: skip

    async def _rest(self, until: float) -> settle.SettledPage:
        """The active tab at rest, whichever it is then: windows that open on the way become active."""
        while True:
            tab = self._tabs.active
            try:
                rest = await settle.wait_until_idle(tab, until)
            except PlaywrightError:
                if not await self._tabs.was_closed(tab):
                    raise
                continue  # it has closed itself
            await self._tabs.wait_for_new_tabs()
            if tab is self._tabs.active:
                return rest

    async def _mark(self, rest: settle.SettledPage, until: float) -> settle.SettledPage:
        """Number the elements; returns the page at rest as it is then."""
        await self._drop_marks()
        size = self._settings.width, self._settings.height
        for _ in range(MARK_ATTEMPTS):
            try:
                self.marks = await find_marks(self._tabs.active, size, self._settings.max_marks)
                return rest
            except PageTooLarge as error:
                self._notes.add(str(error))
                return rest
            except PlaywrightError:
                rest = await self._rest(until)
        self._notes.add("the elements of the page could not be listed")
        return rest

    async def _drop_marks(self) -> None:
        if self.marks is not None:
            await self.marks.close()
            self.marks = None

    async def _capture(self, tab: Tab) -> bytes:
        # What numbers are drawn on is captured without loss.
        encoding = "png" if self._settings.marks else self._settings.screenshot
        options: dict[str, Any] = {"format": encoding, "optimizeForSpeed": True}
        if encoding != "png":
            options["quality"] = self._settings.quality
        return base64.b64decode((await tab.cdp.send("Page.captureScreenshot", options))["data"])


async def retry_if_replaced(look: Callable[[], Awaitable[T]]) -> T:
    """What a look at the page gives, at the next document if one goes away meanwhile. Raises PlaywrightError."""
    for _ in range(OBSERVE_ATTEMPTS - 1):
        try:
            return await look()
        except PlaywrightError as error:
            if not is_document_replaced(error):
                raise
    return await look()
