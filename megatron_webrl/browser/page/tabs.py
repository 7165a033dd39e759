"""The tabs of a session; the agent sees and acts on the active one.

What pages open is answered, adopted or refused, and reported to the agent; endless scripts are terminated.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, CDPSession, Dialog, Download, Page, Request
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.errors import BrowserError, PageCrashed
from megatron_webrl.types import OpenTab
from megatron_webrl.util.text import encodable
from megatron_webrl.util.text import shorten as text_shorten

MAX_MESSAGE_CHARACTERS = 200
MAX_MESSAGES = 8
MAX_TABS = 5
CLOSE_SECONDS = 10.0
NEW_WINDOW_SECONDS = 3.0  # for an announced window to appear, which takes the first response of its URL
CLOSE_EVENT_SECONDS = 1.0
TITLE_SECONDS = 1.0  # for a background tab to report its title; else the title is empty
MAX_TITLE = 200  # characters
MAX_DIALOGS = 20  # in one step; then the running script is terminated and the page's dialog functions are removed
DIALOG_SECONDS = 10.0  # to answer a dialog, or to remove the dialog functions
MAX_TEXT = 100  # characters of a dialog's text
_REMOVE_DIALOGS = (
    "(() => { const nothing = () => undefined; window.alert = window.confirm = window.prompt = nothing; })()"
)
_SCHEMES = frozenset({"http", "https", "about", "blob", "data", "javascript", "chrome-error", ""})
T = TypeVar("T")
ISOLATED_WORLD_NAME = "webrl"
AWAITED_RESOURCE_TYPES = frozenset({"document", "stylesheet", "script", "fetch", "xhr", "image", "font"})
"""Requests whose responses change what the page shows; sockets and event sources never end."""
# Messages with which Chromium reports that the document of a call was replaced.
_REPLACED = (
    "context was destroyed", "context with specified id", "frame was detached", "frame with given id",
    "frame for given id", "Promise was collected", "navigated or closed", "Not attached to an active page",
    "Unable to capture screenshot",
)  # fmt: skip


class StepMessages:
    """Short sentences without duplicates; messages beyond MAX_MESSAGES are only counted."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # "": of the messages that are only counted

    def add(self, text: str) -> None:
        """Add a message; whitespace is collapsed, long text shortened."""
        text = shorten(text, MAX_MESSAGE_CHARACTERS)
        self._counts[text if text in self._counts or len(self._counts) < MAX_MESSAGES else ""] += 1

    def clear(self) -> None:
        self._counts.clear()

    def pop_text(self) -> str:
        """Remove all messages and return them in one line; empty if there are none."""
        omitted = self._counts.pop("", 0)
        sentences = [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]
        self.clear()
        return "; ".join([*sentences, *([f"and {omitted} more"] if omitted else [])])


def shorten(text: str, limit: int) -> str:
    """`text` on one line of at most `limit` characters, which can be encoded."""
    return encodable(text_shorten(" ".join(text[: 10 * limit].split()), limit))


def is_document_replaced(error: PlaywrightError) -> bool:
    """Whether a call failed because its document was replaced; the call may be repeated on the next document."""
    return any(message in error.message for message in _REPLACED)


class DocumentReplaced(Exception):
    """The document was replaced during a call."""


def page_script(name: str) -> str:
    """The JavaScript function in a file of this folder."""
    return Path(__file__).with_name(f"{name}.js").read_text()


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
        self.requests_done = asyncio.Event()  # set unless a request is pending
        self.requests_done.set()
        self.ended_requests = 0  # of those that were pending
        self._pending: set[Request] = set()
        page.on("request", self._on_request)
        page.on("requestfinished", self._on_response)
        page.on("requestfailed", self._on_response)

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

    async def evaluate(self, function: str, argument: Any = None) -> Any:
        """Call a JavaScript function in an isolated world of the document. Raises DocumentReplaced, PlaywrightError."""
        expression = f"({function})({json.dumps(argument)})"
        try:
            world = await open_isolated_world(self.cdp, self.main_frame)
            response = await self.cdp.send(
                "Runtime.evaluate",
                {"expression": expression, "contextId": world, "awaitPromise": True, "returnByValue": True},
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

    async def wait_for_requests(self, seconds: float) -> None:
        """Wait until no request is pending; requests still pending after `seconds` are never waited for again."""
        try:
            async with asyncio.timeout(seconds):
                await self.requests_done.wait()
        except TimeoutError:
            self._pending.clear()
            self.requests_done.set()

    def _on_request(self, request: Request) -> None:
        if request.resource_type in AWAITED_RESOURCE_TYPES:
            self._pending.add(request)
            self.requests_done.clear()

    def _on_response(self, request: Request) -> None:
        if request in self._pending:
            self._pending.remove(request)
            self.ended_requests += 1
        if not self._pending:
            self.requests_done.set()

    def _started_loading(self, event: dict[str, str]) -> None:
        if event["frameId"] == self.main_frame:
            self.loaded.clear()

    def _stopped_loading(self, event: dict[str, str]) -> None:
        if event["frameId"] == self.main_frame:
            self.loaded.set()


class Tabs:
    """The open pages of a context, and what they ask for besides: dialogs are answered, the rest is refused.

    Windows that pages open become tabs up to `limit`; further windows are closed at once. The newest tab becomes active
    in `wait_for_new_tabs`, never between an observation and the agent's action on it. The session is lost when its last
    tab closes.
    """

    def __init__(
        self, context: BrowserContext, messages: StepMessages, limit: int, mark_lost: Callable[[BrowserError], None]
    ) -> None:
        self._context, self._messages, self._limit, self._mark_lost = context, messages, limit, mark_lost
        self._tabs: list[Tab] = []
        self.active: Tab
        self._newest: Tab | None = None  # not yet activated
        self._opening = False
        self._arrived: list[Page] = []  # pages that appeared while this class opens one
        self._announced = 0  # windows that are opening but have not appeared
        self._arrival = asyncio.Event()
        self._adopting: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # others
        self._loss_timer: asyncio.TimerHandle | None = None
        self._dialogs = 0  # in this step
        context.on("dialog", self._on_dialog)

    async def start(self) -> None:
        """Open the first tab, unless the context has one, and subscribe to new ones. Raises PlaywrightError."""
        pages = self._context.pages
        self.active = await self._add(pages[0] if pages else await self._context.new_page())
        self._context.on("page", self._on_page)

    async def wait_for_new_tabs(self) -> None:
        """Wait until opened windows are tabs, and activate the newest. A window that does not appear is forgotten."""
        try:
            async with asyncio.timeout(NEW_WINDOW_SECONDS):
                while self._announced:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            self._announced = 0
        while self._adopting:
            await asyncio.wait(set(self._adopting))
        newest, self._newest = self._newest, None
        if newest is not None and newest in self._tabs:
            await self._activate(newest)

    @property
    def has_single_tab(self) -> bool:
        """Whether there is exactly one tab and none is opening."""
        return len(self._tabs) == 1 and not self._announced and not self._adopting

    async def was_closed(self, tab: Tab) -> bool:
        """Whether an unresponsive tab has closed and another is active; waits for a late close event."""
        try:
            async with asyncio.timeout(CLOSE_EVENT_SECONDS):
                await tab.closed.wait()
        except TimeoutError:
            return False
        return tab is not self.active

    async def open_tab(self) -> Tab | None:
        """Open an empty tab and activate it; at the limit add a message and return None."""
        if len(self._tabs) >= self._limit:
            self._messages.add(f"no more than {self._limit} tabs can be open; close one first")
            return None
        self._opening = True
        try:
            page = await self._context.new_page()
        finally:
            self._opening = False
            arrived, self._arrived = self._arrived, []
        for other in arrived:
            if other is not page:
                self._on_page(other)
        self.active = await self._add(page)
        return self.active

    async def switch_to(self, number: int) -> None:
        """Activate the tab with this number, or add a message if there is none."""
        if (tab := self._numbered(number)) is not None:
            await self._activate(tab)

    async def close_tab(self, number: int | None) -> None:
        """Close the tab with this number (None: the active one), or add a message why it stays open."""
        tab = self.active if number is None else self._numbered(number)
        if tab is None:
            return
        if len(self._tabs) == 1:
            self._messages.add("the only tab stays open")
        else:
            self._remove(tab)
            await _close(tab.page)
            await self._activate(self.active)

    async def list_tabs(self, title: str, url: str) -> tuple[OpenTab, ...]:
        """All tabs in order; `title` and `url` are those of the active tab."""
        tabs, active = list(self._tabs), self.active  # they can change while titles are read
        others = iter(await asyncio.gather(*(_title(tab) for tab in tabs if tab is not active)))
        return tuple(
            OpenTab(title, url, True) if tab is active else OpenTab(next(others), shorten(tab.page.url, 2000), False)
            for tab in tabs
        )

    def close(self) -> None:
        """Stop adopting and closing pages, which close with their context, and answering dialogs."""
        for task in (*self._adopting, *self._tasks):
            task.cancel()
        if self._loss_timer is not None:
            self._loss_timer.cancel()

    def start_step(self) -> None:
        self._dialogs = 0

    def _numbered(self, number: int) -> Tab | None:
        if 1 <= number <= len(self._tabs):
            return self._tabs[number - 1]
        self._messages.add(f"there is no tab {number}; {len(self._tabs)} are open")
        return None

    async def _activate(self, tab: Tab) -> None:
        self.active = tab
        await tab.page.bring_to_front()

    def _on_window(self) -> None:
        if self._limit == 1:
            self._messages.add("a new window was closed; only one page can be open")
        else:
            self._announced += 1

    def _on_page(self, page: Page) -> None:
        self._announced = max(0, self._announced - (not self._opening))
        self._arrival.set()
        if self._opening:
            self._arrived.append(page)
        elif len(self._tabs) + len(self._adopting) < self._limit:
            self._messages.add("a new tab was opened")
            _start(self._adopt(page), self._adopting)
        else:
            if self._limit > 1:  # else _on_window has added a message
                self._messages.add(f"a new window was closed; no more than {self._limit} tabs can be open")
            _start(_close(page), self._tasks)

    async def _adopt(self, page: Page) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                self._newest = await self._add(page)
        except (PlaywrightError, TimeoutError):
            await _close(page)  # it has probably closed itself

    async def _add(self, page: Page) -> Tab:
        tab = await Tab.open(page, self._on_navigation_request, self._on_window)
        page.on("filechooser", lambda chooser: self._messages.add("the page asked for a file; none was given"))
        page.on("download", self._on_download)
        page.on("crash", partial(self._on_crash, tab))
        page.on("close", partial(self._on_close, tab))
        self._tabs.append(tab)
        return tab

    def _on_crash(self, tab: Tab, page: Page) -> None:
        tab.closed.set()
        if tab is self.active:
            self._mark_lost(PageCrashed("the page's renderer process has crashed"))
        elif tab in self._tabs:
            self._remove(tab)
            self._messages.add("a tab in the background has crashed and was closed")

    def _on_close(self, tab: Tab, page: Page) -> None:
        tab.closed.set()
        if tab not in self._tabs:
            return
        self._remove(tab)
        self._messages.add("a tab has closed itself")

    def _remove(self, tab: Tab) -> None:
        self._tabs.remove(tab)
        if not self._tabs:
            # When Chromium ends, its pages close first: wait for the more specific reason.
            ended = BrowserError("the page has closed itself, and no other tab is open")
            self._loss_timer = asyncio.get_running_loop().call_later(CLOSE_EVENT_SECONDS / 2, self._mark_lost, ended)
        elif tab is self.active:
            self.active = self._tabs[-1]

    def _on_navigation_request(self, url: str) -> None:
        try:
            scheme = urlsplit(url).scheme.lower()
        except ValueError:
            return
        if scheme not in _SCHEMES:
            self._messages.add(f"{shorten(url, MAX_TEXT)} was not opened: only web pages can be")

    def _on_download(self, download: Download) -> None:
        self._messages.add(f"the download of {shorten(download.suggested_filename, MAX_TEXT)} was refused")

    def _on_dialog(self, dialog: Dialog) -> None:
        self._dialogs += 1
        shown = shorten(dialog.message, MAX_TEXT)
        if dialog.type == "beforeunload":
            self._messages.add("the page asked whether to leave it; it was left")
        else:
            self._messages.add(f'the page opened a dialog, "{shown}", which was answered with OK')
        tab = next((tab for tab in self._tabs if tab.page is dialog.page), None)
        if self._dialogs % MAX_DIALOGS == 0 and tab is not None:
            # Sent while the dialog blocks the script: takes effect when the script resumes.
            _start(_attempt(DIALOG_SECONDS, lambda: _remove_dialogs(tab.cdp)), self._tasks)
        text = dialog.default_value if dialog.type == "prompt" else None
        _start(_attempt(DIALOG_SECONDS, lambda: dialog.accept(text)), self._tasks)


async def _remove_dialogs(cdp: CDPSession) -> None:
    # Both at once: between two timers no script runs, and terminateExecution is not answered.
    remove = cdp.send("Runtime.evaluate", {"expression": _REMOVE_DIALOGS})
    await asyncio.gather(cdp.send("Runtime.terminateExecution"), remove)


async def terminate_endless_scripts(tabs: Tabs, messages: StepMessages, seconds: float) -> None:
    """Ping the active tab every `seconds` until cancelled; terminate its script if it does not answer in `seconds`."""
    while True:
        await asyncio.sleep(seconds)
        try:
            async with asyncio.timeout(seconds):
                await tabs.active.cdp.send("Runtime.evaluate", {"expression": "0"})
        except TimeoutError:
            messages.add("the page did not answer; the script that it ran was ended")
            # Chromium accepts this command while a script runs, and answers once the script has ended.
            await _attempt(seconds, lambda: tabs.active.cdp.send("Runtime.terminateExecution"))
        except PlaywrightError:
            continue  # the document was replaced or the page has closed: handled elsewhere


async def _attempt(seconds: float, command: Callable[[], Awaitable[T]]) -> T | None:
    """The result of a command; None if there is none within `seconds`, or the page has closed.

    The time limit of the operation, or the end of the context, ends what this leaves undone.
    """
    with suppress(PlaywrightError, TimeoutError):
        async with asyncio.timeout(seconds):
            return await command()
    return None


async def _close(page: Page) -> None:
    await _attempt(CLOSE_SECONDS, page.close)


async def _title(tab: Tab) -> str:
    return shorten(await _attempt(TITLE_SECONDS, tab.page.title) or "", MAX_TITLE)


def _start(work: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
