"""Observe the active tab once it is idle: screenshot, elements, result.

Numbers are drawn on the captured pixels, not in the page, which could detect, move or hide them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property
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
_COLOURS = ("#d7263d", "#1b6ca8", "#2e7d32", "#8e24aa", "#b35900", "#00707a", "#5d4037", "#3949ab")


class ScreenshotDigest:
    """An encoded screenshot with lazily computed digests of its pixels; the pixels are not kept."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded

    def differs(self, other: ScreenshotDigest) -> bool:
        """Whether the pixels differ, not merely the bytes. Raises OSError for bytes that are not an image."""
        if self._encoded == other._encoded:
            return False
        return self._coarse != other._coarse or self._fine != other._fine

    @cached_property
    def _coarse(self) -> bytes:
        """For JPEG, the digest of the means of 8x8 blocks, a sixth of the work of a full decode; else `_fine`."""
        with Image.open(io.BytesIO(self._encoded)) as image:
            if image.format != "JPEG":
                return self._fine
            image.draft("RGB", (image.width // 8, image.height // 8))
            return _digest(image)

    @cached_property
    def _fine(self) -> bytes:
        with Image.open(io.BytesIO(self._encoded)) as image:
            return _digest(image)


def _digest(image: Image.Image) -> bytes:
    digest = hashlib.sha256(str(image.size).encode())
    digest.update((image if image.mode == "RGB" else image.convert("RGB")).tobytes())
    return digest.digest()


def draw_marks(screenshot: bytes, elements: Sequence[Element], encoding: str, quality: int) -> bytes:
    """The screenshot with a numbered box around each element, as "png", "jpeg" or "webp". Raises OSError (no image)."""
    with Image.open(io.BytesIO(screenshot)) as opened:
        image = opened.convert("RGB")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(LABEL_SIZE)
    for element in elements:
        colour = _COLOURS[element.id % len(_COLOURS)]
        x, y, width, height = element.box
        draw.rectangle((x, y, x + width - 1, y + height - 1), outline=colour, width=2)
    for element in elements:  # after all boxes, so that no box covers a number
        _label(draw, font, element, image.size)
    buffer = io.BytesIO()
    if encoding == "png":
        image.save(buffer, "PNG", compress_level=1)
    elif encoding == "webp":
        image.save(buffer, "WEBP", quality=quality, method=2)
    else:
        image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _label(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, element: Element,
    size: tuple[int, int],
) -> None:  # fmt: skip
    """Draw the number at the top left: above the box, or inside it if there is no room above."""
    text = str(element.id)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = int(right - left) + 4, int(bottom - top) + 4
    x = max(0, min(element.box[0], size[0] - width))
    y = element.box[1] - height if element.box[1] >= height else element.box[1]
    draw.rectangle((x, y, x + width - 1, y + height - 1), fill=_COLOURS[element.id % len(_COLOURS)])
    draw.text((x + 2 - left, y + 2 - top), text, fill="white", font=font)


MARK_ATTEMPTS = 3  # a page replaced this often while its elements are listed is shown without numbers
OBSERVE_ATTEMPTS = 10  # a page replaced this often while it is observed cannot be observed
T = TypeVar("T")


class PageObserver:
    """Builds observations. `marks` are the elements of the latest observation."""

    def __init__(self, tabs: Tabs, settings: BrowserConfig, messages: StepMessages, network: NetworkAccess) -> None:
        self.marks: Marks | None = None
        self._tabs, self._settings, self._messages, self._network = tabs, settings, messages, network
        self._digest: ScreenshotDigest | None = None  # of the latest screenshot, without numbers
        self._still = bool(settings.record or settings.replay)

    async def reset(self) -> None:
        """Forget the latest observation."""
        self._digest = None
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
        before, self._digest = self._digest, ScreenshotDigest(image)
        changed = before is not None and await asyncio.to_thread(self._digest.differs, before)
        elements = self.marks.elements if self.marks else None
        if elements is not None:
            settings = self._settings
            image = await asyncio.to_thread(draw_marks, image, elements, settings.screenshot, settings.quality)
        tabs = await self._tabs.list_tabs(settled.title, settled.url)
        if settled.url.startswith("chrome-error:"):
            self._messages.add("the page cannot be reached")
        for sentence in self._network.take_errors(settled.url):
            self._messages.add(sentence)
        if settled.loading:
            self._messages.add("the page is still loading")
        seconds = StepSeconds(seconds_acting, settled_at - started, time.monotonic() - settled_at)
        return Observation(
            screenshot=image, url=settled.url, title=encodable(settled.title), page_changed=changed,
            instruction=instruction and encodable(instruction), error=encodable(self._messages.pop_text()) or None,
            reward=reward, done=done, elements=elements and tuple(map(_encodable_element, elements)),
            tabs=tuple(replace(each, title=encodable(each.title)) for each in tabs), scroll=settled.scroll,
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
            await self.marks.close()
            self.marks = None

    async def _capture(self, tab: Tab) -> bytes:
        encoding = "png" if self._settings.marks else self._settings.screenshot  # numbers need a lossless capture
        options: dict[str, Any] = {"format": encoding, "optimizeForSpeed": True}
        if encoding != "png":
            options["quality"] = self._settings.quality
        return base64.b64decode((await tab.cdp.send("Page.captureScreenshot", options))["data"])


def _encodable_element(element: Element) -> Element:
    options = tuple(map(encodable, element.options))
    return replace(element, name=encodable(element.name), value=encodable(element.value), options=options)


async def retry_if_replaced(call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()`; repeat it on the next document if the document is replaced. Raises PlaywrightError."""
    for _ in range(OBSERVE_ATTEMPTS - 1):
        try:
            return await call()
        except PlaywrightError as error:
            if not is_document_replaced(error):
                raise
    return await call()
