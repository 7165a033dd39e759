"""Observe the active tab once it is idle: screenshot, elements, result.

Numbers are drawn on the captured pixels, not in the page, which could detect, move or hide them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from PIL import Image, ImageDraw, ImageFont
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.egress.egress_policy import NOT_RECORDED, NetworkAccess
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.page.elements import Marks, PageTooLarge, find_marks
from megatron_webrl.browser.page.tabs import StepMessages, Tab, Tabs, is_document_replaced
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Element, Observation, StepSeconds, Task, TaskSite
from megatron_webrl.util.text import encodable

MAX_MARKS = 100  # elements numbered in one observation
LABEL_SIZE = 12  # pixels
QUALITY = 80  # of JPEG and WebP
_COLOURS = ("#d7263d", "#1b6ca8", "#2e7d32", "#8e24aa", "#b35900", "#00707a", "#5d4037", "#3949ab")


def pixels_differ(screenshot: bytes, other: bytes) -> bool:
    """Whether the pixels of encoded images differ, not merely the bytes. Raises OSError (no image)."""
    if screenshot == other:
        return False
    with Image.open(io.BytesIO(screenshot)) as one, Image.open(io.BytesIO(other)) as two:
        return one.size != two.size or one.convert("RGB").tobytes() != two.convert("RGB").tobytes()


def draw_marks(screenshot: bytes, elements: Sequence[Element], encoding: str) -> bytes:
    """The screenshot with a numbered box around each element, as "png", "jpeg" or "webp". Raises OSError (no image)."""
    with Image.open(io.BytesIO(screenshot)) as opened:
        image = opened.convert("RGB")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(LABEL_SIZE)
    for element in elements:
        x, y, width, height = element.box
        draw.rectangle((x, y, x + width - 1, y + height - 1), outline=_COLOURS[element.id % len(_COLOURS)], width=2)
    for element in elements:  # after all boxes, so that no box covers a number
        text = str(element.id)
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        width, height = int(right - left) + 4, int(bottom - top) + 4
        x = max(0, min(element.box[0], image.width - width))
        y = element.box[1] - height if element.box[1] >= height else element.box[1]  # above the box if there is room
        draw.rectangle((x, y, x + width - 1, y + height - 1), fill=_COLOURS[element.id % len(_COLOURS)])
        draw.text((x + 2 - left, y + 2 - top), text, fill="white", font=font)
    buffer = io.BytesIO()
    options: dict[str, dict[str, Any]] = {
        "png": {"compress_level": 1},
        "webp": {"quality": QUALITY, "method": 2},
        "jpeg": {"quality": QUALITY},
    }
    image.save(buffer, encoding, **options[encoding])
    return buffer.getvalue()


MARK_ATTEMPTS = 3  # a page replaced this often while its elements are listed is shown without numbers
OBSERVE_ATTEMPTS = 10  # a page replaced this often while it is observed cannot be observed
T = TypeVar("T")


class PageObserver:
    """Builds observations. `marks` are the elements of the latest observation."""

    def __init__(self, tabs: Tabs, settings: BrowserConfig, messages: StepMessages, network: NetworkAccess) -> None:
        self.marks: Marks | None = None
        self._tabs, self._settings, self._messages, self._network = tabs, settings, messages, network
        self._screenshot: bytes | None = None  # the latest, without numbers
        self._still = bool(settings.record or settings.replay)

    async def reset(self) -> None:
        self._screenshot = None
        await self._drop_marks()

    async def observe(self, site: TaskSite, task: Task, seconds_acting: float, instruction: str | None) -> Observation:
        """Wait until the page is idle and observe it. Raises PlaywrightError if it is lost."""
        started = time.monotonic()
        until = asyncio.get_running_loop().time() + settle.SETTLE_SECONDS
        settled = await self._settle(until)
        settled_at = time.monotonic()
        if self._settings.marks:
            settled = await self._mark(settled, until)
        tab = self._tabs.active
        image, (reward, done) = await asyncio.gather(
            retry_if_replaced(lambda: self._capture(tab)), retry_if_replaced(lambda: site.result(tab.page, task))
        )
        before, self._screenshot = self._screenshot, image
        changed = before is not None and await asyncio.to_thread(pixels_differ, image, before)
        elements = self.marks.elements if self.marks else None
        if elements is not None:
            settings = self._settings
            image = await asyncio.to_thread(draw_marks, image, elements, settings.screenshot)
        title = encodable(settled.title)
        listed = "switch_tab" in self._settings.actions
        tabs = await self._tabs.list_tabs(title, settled.url) if listed else ()
        if settled.url.startswith("chrome-error:"):
            self._messages.add("the page cannot be reached")
        for sentence in self._network.take_errors(settled.url):
            self._messages.add(sentence)
        if settled.loading:
            self._messages.add("the page is still loading")
        seconds = StepSeconds(seconds_acting, settled_at - started, time.monotonic() - settled_at)
        return Observation(
            screenshot=image, url=settled.url, title=title, page_changed=changed,
            instruction=instruction and encodable(instruction), error=self._messages.pop_text() or None,
            reward=reward, done=done, elements=elements, tabs=tabs, scroll=settled.scroll,
            not_recorded_requests=self._network.refused[NOT_RECORDED], seconds=seconds,
        )  # fmt: skip

    async def _settle(self, until: float) -> settle.SettledPage:
        """Wait until the active tab is idle; a window that opens in the meantime becomes the active tab."""
        while True:
            tab = self._tabs.active
            try:
                settled = await settle.wait_until_idle(tab, until, self._still)
            except PlaywrightError:
                if not await self._tabs.was_closed(tab):
                    raise
                continue  # the tab has closed itself
            await self._tabs.wait_for_new_tabs()
            if tab is self._tabs.active:
                return settled

    async def _mark(self, settled: settle.SettledPage, until: float) -> settle.SettledPage:
        """Number the elements; returns the page state that the numbers belong to."""
        await self._drop_marks()
        size = self._settings.width, self._settings.height
        for _ in range(MARK_ATTEMPTS):
            try:
                self.marks = await find_marks(self._tabs.active, size, MAX_MARKS)
                return settled
            except PageTooLarge as error:
                self._messages.add(str(error))
                return settled
            except PlaywrightError:
                settled = await self._settle(until)
        self._messages.add("the elements of the page could not be listed")
        return settled

    async def _drop_marks(self) -> None:
        if self.marks is not None:
            await self.marks.renderer_tree.close()
            self.marks = None

    async def _capture(self, tab: Tab) -> bytes:
        encoding = "png" if self._settings.marks else self._settings.screenshot  # numbers need a lossless capture
        options: dict[str, Any] = {"format": encoding, "optimizeForSpeed": True}
        if encoding != "png":
            options["quality"] = QUALITY
        return base64.b64decode((await tab.cdp.send("Page.captureScreenshot", options))["data"])


async def retry_if_replaced(call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()`; repeat it on the next document if the document is replaced. Raises PlaywrightError."""
    for _ in range(OBSERVE_ATTEMPTS - 1):
        try:
            return await call()
        except PlaywrightError as error:
            if not is_document_replaced(error):
                raise
    return await call()
