"""One open page: whether it loads, and evaluation that it cannot tamper with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from playwright.async_api import CDPSession, Page, Request
from playwright.async_api import Error as PlaywrightError

ISOLATED_WORLD_NAME = (
    "webrl"  # name of the isolated world: it shares the document with the page, but no object of JavaScript
)

AWAITED_RESOURCE_TYPES = frozenset({"document", "stylesheet", "script", "fetch", "xhr", "image", "font"})
"""Kinds of requests whose answers change what is seen; a socket or an event source never ends."""

# How the browser says that the document of an evaluation has gone.
_REPLACED = (
    "context was destroyed", "context with specified id", "frame was detached", "frame with given id",
    "frame for given id", "Promise was collected", "navigated or closed", "Not attached to an active page",
    "Unable to capture screenshot",
)  # fmt: skip


def is_document_replaced(error: PlaywrightError) -> bool:
    """Whether something failed because its document went away; the next document may be asked."""
    return any(words in error.message for words in _REPLACED)


class DocumentReplaced(Exception):
    """The document was replaced by another one in the middle of what was done with it."""


class Tab:
    """A page with a CDP session of its own. `loaded` is set while its main frame loads nothing."""

    def __init__(self, page: Page, cdp: CDPSession) -> None:
        self.page, self.cdp = page, cdp
        self.main_frame = ""
        self.closed = asyncio.Event()  # it has crashed or closed
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.pending_requests = PendingRequests(page)

    @classmethod
    async def open(cls, page: Page, requested: Callable[[str], None], announced: Callable[[], None]) -> Tab:
        """Listen to `page`. Raises PlaywrightError.

        `requested` is told each address that the page asks to go to, `announced` of each window that it opens.
        """
        cdp = await page.context.new_cdp_session(page)
        tab = cls(page, cdp)
        cdp.on("Page.frameStartedLoading", tab._started_loading)
        cdp.on("Page.frameStoppedLoading", tab._stopped_loading)
        cdp.on("Page.frameRequestedNavigation", lambda event: requested(event["url"]))
        cdp.on("Page.windowOpen", lambda event: announced())
        await cdp.send("Page.enable")
        tab.main_frame = (await cdp.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        return tab

    async def evaluate(self, function: str) -> Any:
        """What a function of JavaScript returns in the main document, out of reach of the page's own scripts.

        Raises Replaced if the document goes away meanwhile, PlaywrightError for everything else.
        """
        try:
            world = await self.cdp.send(
                "Page.createIsolatedWorld", {"frameId": self.main_frame, "worldName": ISOLATED_WORLD_NAME}
            )
            answer = await self.cdp.send(
                "Runtime.evaluate",
                {
                    "expression": f"({function})()",
                    "contextId": world["executionContextId"],
                    "awaitPromise": True,
                    "returnByValue": True,
                },
            )
        except PlaywrightError as error:
            if is_document_replaced(error):
                raise DocumentReplaced(error.message) from error
            raise
        if "exceptionDetails" in answer:
            raise PlaywrightError(f"a script failed: {answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    async def navigate(self, url: str, seconds: float) -> str | None:
        """Open an address and wait until it answers; returns what went wrong. Raises PlaywrightError."""
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
    """The requests of a page that are under way."""

    def __init__(self, page: Page) -> None:
        self._pending: set[Request] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        page.on("request", self._started)
        page.on("requestfinished", self._ended)
        page.on("requestfailed", self._ended)

    async def wait_idle(self, seconds: float) -> None:
        """Until nothing is under way; what is not answered within `seconds` is not waited for again."""
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
