"""The tabs of a session; the agent sees and acts on the active one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from playwright.async_api import BrowserContext, Page
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.errors import BrowserError, PageCrashed
from megatron_webrl.browser.page.popup_handler import PopupHandler
from megatron_webrl.browser.page.step_messages import StepMessages, shorten
from megatron_webrl.browser.page.tab import Tab
from megatron_webrl.types import OpenTab

CLOSE_SECONDS = 10.0
NEW_WINDOW_SECONDS = 3.0  # for an announced window to appear, which takes the first response of its URL
CLOSE_EVENT_SECONDS = 1.0
TITLE_SECONDS = 1.0  # for a background tab to report its title; else the title is empty
MAX_TITLE = 200  # characters


class Tabs:
    """Windows that pages open become tabs up to `limit`; further windows are closed at once.

    The newest tab becomes active in `wait_for_new_tabs`, never between an observation and the agent's action on it. The
    session is lost when its last tab closes.
    """

    def __init__(
        self, context: BrowserContext, messages: StepMessages, popups: PopupHandler, limit: int,
        mark_lost: Callable[[BrowserError], None],
    ) -> None:  # fmt: skip
        self._context, self._messages, self._popups = context, messages, popups
        self._limit, self._mark_lost = limit, mark_lost
        self._tabs: list[Tab] = []
        self.active: Tab
        self._newest: Tab | None = None  # not yet activated
        self._opening = False
        self._arrived: list[Page] = []  # pages that appeared while this class opens one
        self._announced = 0  # windows that are opening but have not appeared
        self._arrival = asyncio.Event()
        self._adopting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._loss_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Open the first tab and subscribe to new ones. Raises PlaywrightError."""
        self.active = await self._add(await self._context.new_page())
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
        if not 1 <= number <= len(self._tabs):
            self._messages.add(f"there is no tab {number}; {len(self._tabs)} are open")
            return
        await self._activate(self._tabs[number - 1])

    async def close_tab(self, number: int | None) -> None:
        """Close the tab with this number (None: the active one), or add a message why it stays open."""
        tab = self.active if number is None else self._numbered(number)
        if tab is None:
            self._messages.add(f"there is no tab {number}; {len(self._tabs)} are open")
        elif len(self._tabs) == 1:
            self._messages.add("the only tab stays open")
        else:
            self._remove(tab)
            await _close(tab.page)
            await self._activate(self.active)

    async def list_tabs(self, title: str, url: str) -> tuple[OpenTab, ...]:
        """All tabs in order; `title` and `url` are those of the active tab. Empty if only one tab is allowed."""
        if self._limit == 1:
            return ()
        tabs, active = list(self._tabs), self.active  # they can change while titles are read
        others = iter(await asyncio.gather(*(_title(tab) for tab in tabs if tab is not active)))
        return tuple(
            OpenTab(title, url, True) if tab is active else OpenTab(next(others), shorten(tab.page.url, 2000), False)
            for tab in tabs
        )

    def close(self) -> None:
        """Stop adopting and closing pages; they close with their context."""
        for task in (*self._adopting, *self._closing):
            task.cancel()
        if self._loss_timer is not None:
            self._loss_timer.cancel()

    def _numbered(self, number: int) -> Tab | None:
        return self._tabs[number - 1] if 1 <= number <= len(self._tabs) else None

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
            task = asyncio.get_running_loop().create_task(self._adopt(page))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)
        else:
            if self._limit > 1:  # else _on_window has added a message
                self._messages.add(f"a new window was closed; no more than {self._limit} tabs can be open")
            task = asyncio.get_running_loop().create_task(_close(page))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _adopt(self, page: Page) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                self._newest = await self._add(page)
        except (PlaywrightError, TimeoutError):
            await _close(page)  # it has probably closed itself

    async def _add(self, page: Page) -> Tab:
        tab = await Tab.open(page, self._popups.on_navigation_request, self._on_window)
        self._popups.attach(page, tab.cdp)
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


async def _close(page: Page) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await page.close()
    except (PlaywrightError, TimeoutError):
        pass  # it closes with its context at the latest


async def _title(tab: Tab) -> str:
    try:
        async with asyncio.timeout(TITLE_SECONDS):
            return shorten(await tab.page.title(), MAX_TITLE)
    except (PlaywrightError, TimeoutError):
        return ""
