"""One browser context with one page, for one episode: reset, step, close."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from playwright.async_api import Browser, BrowserContext, CDPSession, Page, ProxySettings
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser import settle
from megatron_webrl.browser.access import Access
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.pixels import pixels_differ
from megatron_webrl.browser.site import Site
from megatron_webrl.config import BrowserConfig
from megatron_webrl.types import COORDINATE_RANGE, Action, Observation, Task

SCROLL_OVERLAP = 50  # pixels that stay in view when scrolling
WAIT_SECONDS = 1.0  # of a wait action without a time
MAX_WAIT_SECONDS = 5.0
CLOSE_SECONDS = 10.0
T = TypeVar("T")


class Session:
    """Life: prepare -> reset -> step, step, ... -> close; a fleet prepares and closes it.

    Every operation ends within `step_seconds` or raises a BrowserError; after one the session is of no more use.
    """

    def __init__(
        self, context: BrowserContext, page: Page, cdp: CDPSession, settings: BrowserConfig,
        sites: Mapping[str, Site], step_seconds: float, access: Access,
    ) -> None:  # fmt: skip
        self.page = page
        self.access = access
        self.task: Task | None = None
        self._context, self._cdp, self._settings = context, cdp, settings
        self._sites, self._step_seconds = sites, step_seconds
        self._screenshot: bytes | None = None
        self._notes: list[str] = []  # what happened during an action that the agent should know
        self._loaded = asyncio.Event()
        self._loaded.set()
        self._lost: asyncio.Future[BrowserError] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()
        self._main_frame = ""

    @classmethod
    async def prepare(
        cls, browser: Browser, settings: BrowserConfig, sites: Mapping[str, Site], step_seconds: float,
        access: Access, proxy: ProxySettings,
    ) -> Session:  # fmt: skip
        """A context of its own with an empty page, ready for `reset`. Raises BrowserError.

        `access` is what the context may reach, by way of `proxy`; `close` closes it.
        """
        context = None
        try:
            async with asyncio.timeout(step_seconds):
                context = await browser.new_context(
                    viewport={"width": settings.width, "height": settings.height},
                    device_scale_factor=1,
                    service_workers="block",
                    accept_downloads=False,
                    proxy=proxy,
                )
                await context.add_init_script(settle.STILL_CARET)
                page = await context.new_page()
                session = cls(context, page, await context.new_cdp_session(page), settings, sites, step_seconds, access)
                await session._listen(browser)
                return session
        except (PlaywrightError, TimeoutError) as error:
            if not browser.is_connected():
                raise BrowserCrashed(f"Chromium ended while a context was opened: {_first_line(error)}") from error
            raise BrowserError(
                f"no context within {step_seconds} s (rollout.step_seconds): {_first_line(error)}"
            ) from error

    async def reset(self, task: Task) -> Observation:
        """Open the task's page; `instruction` is set. Raises BrowserError, KeyError for an unknown source."""
        self.task = task
        instruction = await self._bounded(f"reset of {task.id}", self._sites[task.source].open(self.page, task))
        self._notes.clear()
        # Going back must not lead out of the task, to the empty page before it.
        await self._bounded("reset of the history", self._cdp.send("Page.resetNavigationHistory"))
        return await self._bounded("observation", self._observe(instruction=instruction))

    async def step(self, action: Action) -> Observation:
        """Carry out an action and wait until the page has come to rest.

        What the page does not allow is told in Observation.error, and the episode goes on. Raises BrowserError.
        """
        self._notes.clear()
        await self._bounded(action.kind, self._act(action))
        return await self._bounded(f"observation after {action.kind}", self._observe())

    async def close(self) -> None:
        """Close the context; what a crashed browser cannot close is gone already."""
        if self._context.browser is not None:  # which outlives this session by far
            self._context.browser.remove_listener("disconnected", self._browser_ended)
        for task in self._background:
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._context.close()
        except (PlaywrightError, TimeoutError) as error:
            self._lose(BrowserError(f"a context did not close within {CLOSE_SECONDS} s: {_first_line(error)}"))
        finally:
            await self.access.close()

    # What an action could not do goes to the notes.

    async def _act(self, action: Action) -> None:
        if action.kind == "left_click" and action.coordinate is not None:
            await self._click(action.coordinate)
        elif action.kind == "type" and action.text is not None:
            await self._type(action.coordinate, action.text)
        elif action.kind == "scroll" and action.direction is not None:
            await self._scroll(action.coordinate, action.direction)
        elif action.kind == "wait":
            await asyncio.sleep(min(WAIT_SECONDS if action.time is None else action.time, MAX_WAIT_SECONDS))
        elif action.kind == "go_back":
            await self._go_back()
        elif action.kind == "navigate" and action.url is not None:
            await self._navigate(action.url)
        elif action.kind != "answer":
            raise ValueError(f"{action} lacks what its kind needs")

    async def _click(self, coordinate: tuple[int, int]) -> None:
        await self.page.mouse.click(*self._pixel(coordinate))

    async def _type(self, coordinate: tuple[int, int] | None, text: str) -> None:
        if coordinate is not None:
            await self._click(coordinate)
            await self._rest()
        length = await self.page.evaluate(settle.FOCUSED_TEXT)
        if length is None:
            self._notes.append("no text field has the focus")
            return
        if length:
            await self.page.keyboard.press("ControlOrMeta+a")
            await self.page.keyboard.press("Backspace")
        await self.page.keyboard.type(text)
        await self.page.keyboard.press("Enter")

    async def _scroll(self, coordinate: tuple[int, int] | None, direction: str) -> None:
        middle = COORDINATE_RANGE // 2
        await self.page.mouse.move(*self._pixel(coordinate or (middle, middle)))
        distance = max(self._settings.height - SCROLL_OVERLAP, SCROLL_OVERLAP)
        await self.page.mouse.wheel(0, distance if direction == "down" else -distance)

    async def _go_back(self) -> None:
        history = await self._cdp.send("Page.getNavigationHistory")
        if history["currentIndex"] <= 0:
            self._notes.append("there is no earlier page")
            return
        await self.page.go_back(wait_until="commit", timeout=self._step_seconds * 1000)

    async def _navigate(self, url: str) -> None:
        if refusal := self.access.refusal(url):
            self._notes.append(f"{url[:200]} may not be opened: {refusal}")
            return
        result = await self._cdp.send("Page.navigate", {"url": url})
        if result.get("errorText"):
            self._notes.append(f"{url[:200]} cannot be opened: {result['errorText']}")

    # Observation

    async def _observe(self, instruction: str | None = None) -> Observation:
        title, url = await self._rest()
        assert self.task is not None
        screenshot, (reward, done) = await asyncio.gather(
            self._capture(), self._sites[self.task.source].result(self.page, self.task)
        )
        changed = self._screenshot is not None and await asyncio.to_thread(pixels_differ, self._screenshot, screenshot)
        self._screenshot = screenshot
        if url.startswith("chrome-error:"):
            self._notes.append("the page cannot be reached")
        self._notes += self.access.news(url)
        return Observation(
            screenshot=screenshot, url=url, title=title, page_changed=changed, instruction=instruction,
            error="; ".join(self._notes) or None, reward=reward, done=done,
        )  # fmt: skip

    async def _rest(self) -> tuple[str, str]:
        """Wait until nothing loads and nothing moves; returns title and URL."""
        while True:
            await self._loaded.wait()
            try:
                title, url = await self.page.evaluate(settle.SETTLE)
            except PlaywrightError as error:
                if "context was destroyed" not in error.message and "frame was detached" not in error.message:
                    raise
                continue  # a navigation took place; the next document is asked
            if self._loaded.is_set():
                return str(title), str(url)

    async def _capture(self) -> bytes:
        options: dict[str, Any] = {"format": self._settings.screenshot, "optimizeForSpeed": True}
        if self._settings.screenshot == "jpeg":
            options["quality"] = self._settings.quality
        return base64.b64decode((await self._cdp.send("Page.captureScreenshot", options))["data"])

    def _pixel(self, coordinate: tuple[int, int]) -> tuple[float, float]:
        """CSS pixels of a coordinate in 0..COORDINATE_RANGE; the far edge is the last pixel."""
        x, y = coordinate
        width, height = self._settings.width, self._settings.height
        return min(x * width / COORDINATE_RANGE, width - 1), min(y * height / COORDINATE_RANGE, height - 1)

    # Limits and losses

    async def _bounded(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or a BrowserError after `step_seconds` or as soon as the page is lost."""
        running = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {running, self._lost}
        try:
            await asyncio.wait(either, timeout=self._step_seconds, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if self._lost.done():
                raise self._lost.result()
            raise BrowserTimeout(f"{name} took more than {self._step_seconds} s (rollout.step_seconds)")
        except PlaywrightError as error:
            if self._lost.done():
                raise self._lost.result() from error
            raise BrowserError(f"{name} failed: {_first_line(error)}") from error
        finally:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _listen(self, browser: Browser) -> None:
        self.page.on("crash", lambda _: self._lose(PageCrashed("the page's renderer process has crashed")))
        browser.on("disconnected", self._browser_ended)
        self._context.on("page", self._close_popup)
        self._cdp.on("Page.frameStartedLoading", self._started_loading)
        self._cdp.on("Page.frameStoppedLoading", self._stopped_loading)
        await self._cdp.send("Page.enable")
        self._main_frame = (await self._cdp.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]

    def _started_loading(self, event: dict[str, str]) -> None:
        if event["frameId"] == self._main_frame:
            self._loaded.clear()

    def _stopped_loading(self, event: dict[str, str]) -> None:
        if event["frameId"] == self._main_frame:
            self._loaded.set()

    def _close_popup(self, popup: Page) -> None:
        """The agent sees one page: others are closed at once, and it is told."""
        self._notes.append("a new window was closed; only one page can be open")
        task = asyncio.get_running_loop().create_task(_close_page(popup))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _browser_ended(self, browser: Browser) -> None:
        self._lose(BrowserCrashed("Chromium has ended"))

    def _lose(self, error: BrowserError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)


async def _close_page(page: Page) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await page.close()
    except (PlaywrightError, TimeoutError):
        pass  # it goes with its context at the latest


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
