"""One open page: its loading state, and scripts that the page cannot tamper with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from playwright.async_api import CDPSession, Page, Request
from playwright.async_api import Error as PlaywrightError

ISOLATED_WORLD_NAME = "webrl"
AWAITED_RESOURCE_TYPES = frozenset({"document", "stylesheet", "script", "fetch", "xhr", "image", "font"})
"""Requests whose responses change what the page shows; sockets and event sources never end."""

# Messages with which Chromium reports that the document of a call was replaced.
_REPLACED = (
    "context was destroyed", "context with specified id", "frame was detached", "frame with given id",
    "frame for given id", "Promise was collected", "navigated or closed", "Not attached to an active page",
    "Unable to capture screenshot",
)  # fmt: skip


def is_document_replaced(error: PlaywrightError) -> bool:
    """Whether a call failed because its document was replaced; the call may be repeated on the next document."""
    return any(message in error.message for message in _REPLACED)


class DocumentReplaced(Exception):
    """The document was replaced during a call."""


async def open_isolated_world(cdp: CDPSession, frame_id: str) -> int:
    """Id of an execution context that shares the frame's document, but no JavaScript object, with the page."""
    world = await cdp.send("Page.createIsolatedWorld", {"frameId": frame_id, "worldName": ISOLATED_WORLD_NAME})
    return int(world["executionContextId"])


def script_result(response: dict[str, Any]) -> Any:
    """Return value of a script by the response of the Runtime domain. Raises PlaywrightError if the script failed."""
    if "exceptionDetails" in response:
        raise PlaywrightError(f"a script failed: {response['exceptionDetails'].get('text')}")
    return response["result"].get("value")


class Tab:
    """A page with its own CDP session. `loaded` is set unless the main frame is loading."""

    def __init__(self, page: Page, cdp: CDPSession) -> None:
        self.page, self.cdp = page, cdp
        self.main_frame = ""
        self.closed = asyncio.Event()  # or crashed
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.pending_requests = PendingRequests(page)

    @classmethod
    async def open(cls, page: Page, on_navigation: Callable[[str], None], on_window: Callable[[], None]) -> Tab:
        """Subscribe to `page`: URLs of the navigations it requests, windows it opens. Raises PlaywrightError."""
        cdp = await page.context.new_cdp_session(page)
        tab = cls(page, cdp)
        cdp.on("Page.frameStartedLoading", tab._started_loading)
        cdp.on("Page.frameStoppedLoading", tab._stopped_loading)
        cdp.on("Page.frameRequestedNavigation", lambda event: on_navigation(event["url"]))
        cdp.on("Page.windowOpen", lambda event: on_window())
        await cdp.send("Page.enable")
        tab.main_frame = (await cdp.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        return tab

    async def evaluate(self, function: str) -> Any:
        """Call a JavaScript function in an isolated world of the document. Raises DocumentReplaced, PlaywrightError."""
        try:
            world = await open_isolated_world(self.cdp, self.main_frame)
            response = await self.cdp.send(
                "Runtime.evaluate",
                {"expression": f"({function})()", "contextId": world, "awaitPromise": True, "returnByValue": True},
            )
        except PlaywrightError as error:
            if is_document_replaced(error):
                raise DocumentReplaced(error.message) from error
            raise
        return script_result(response)

    async def navigate(self, url: str, seconds: float) -> str | None:
        """Open a URL and wait for the response; returns an error message or None. Raises PlaywrightError."""
        try:
            async with asyncio.timeout(seconds):
                result = await self.cdp.send("Page.navigate", {"url": url})
        except TimeoutError:
            await self.cdp.send("Page.stopLoading")
            return f"no answer within {seconds:g} s"
        return str(result["errorText"]) if result.get("errorText") else None

    def _started_loading(self, event: dict[str, str]) -> None:
        if event["frameId"] == self.main_frame:
            self.loaded.clear()

    def _stopped_loading(self, event: dict[str, str]) -> None:
        if event["frameId"] == self.main_frame:
            self.loaded.set()


class PendingRequests:
    """The unanswered requests of a page."""

    def __init__(self, page: Page) -> None:
        self._pending: set[Request] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        page.on("request", self._started)
        page.on("requestfinished", self._ended)
        page.on("requestfailed", self._ended)

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no request is pending; requests still pending after `seconds` are never waited for again."""
        try:
            async with asyncio.timeout(seconds):
                await self.idle.wait()
        except TimeoutError:
            self._pending.clear()
            self.idle.set()

    def _started(self, request: Request) -> None:
        if request.resource_type in AWAITED_RESOURCE_TYPES:
            self._pending.add(request)
            self.idle.clear()

    def _ended(self, request: Request) -> None:
        self._pending.discard(request)
        if not self._pending:
            self.idle.set()
