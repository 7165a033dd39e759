"""The tabs of a session: one is active, and what the agent sees and acts on."""

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
NEW_WINDOW_SECONDS = 3.0  # for a window to be there, which takes the first answer of its address
CLOSE_EVENT_SECONDS = 1.0
TITLE_SECONDS = 1.0  # a tab in the background that does not tell its title by then has none
MAX_TITLE = 200  # characters


class Tabs:
    """Windows that pages open become tabs while there are fewer than `limit`; beyond it they are closed at once.

    The newest becomes active when it is next looked at (`settled`), never between an observation and the action that
    answers it. The end of the last tab loses the session.
    """

    def __init__(
        self, context: BrowserContext, notes: StepMessages, intrusions: PopupHandler, limit: int,
        lose: Callable[[BrowserError], None],
    ) -> None:  # fmt: skip
        self._context, self._notes, self._intrusions = context, notes, intrusions
        self._limit, self._lose = limit, lose
        self._tabs: list[Tab] = []
        self.active: Tab
        self._newest: Tab | None = None  # a window that was not looked at yet
        self._opening = False
        self._arrived: list[Page] = []  # while this class itself opens a page
        self._announced = 0  # windows that open, but are not there yet
        self._arrival = asyncio.Event()
        self._adopting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._end: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Open the first tab and listen for others. Raises PlaywrightError."""
        self.active = await self._add(await self._context.new_page())
        self._context.on("page", self._appeared)

    async def wait_for_new_tabs(self) -> None:
        """Wait until windows that were opened are tabs; the newest is active. One that does not come is forgotten."""
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
        """Whether there is one tab, and none on its way."""
        return len(self._tabs) == 1 and not self._announced and not self._adopting

    async def was_closed(self, tab: Tab) -> bool:
        """Whether a tab that failed to answer has gone and another one is active; the news may come a little later."""
        try:
            async with asyncio.timeout(CLOSE_EVENT_SECONDS):
                await tab.closed.wait()
        except TimeoutError:
            return False
        return tab is not self.active

    async def open_tab(self) -> Tab | None:
        """A new empty tab, active; None, with a note, at the limit."""
        if len(self._tabs) >= self._limit:
            self._notes.add(f"no more than {self._limit} tabs can be open; close one first")
            return None
        self._opening = True
        try:
            page = await self._context.new_page()
        finally:
            self._opening = False
            arrived, self._arrived = self._arrived, []
        for other in arrived:
            if other is not page:
                self._appeared(other)
        self.active = await self._add(page)
        return self.active

    async def switch_to(self, number: int) -> None:
        """Make the tab with this number active, or note that there is none."""
        if not 1 <= number <= len(self._tabs):
            self._notes.add(f"there is no tab {number}; {len(self._tabs)} are open")
            return
        await self._activate(self._tabs[number - 1])

    async def close_tab(self, number: int | None) -> None:
        """Close the tab with this number or the active one, or note why it stays."""
        tab = self.active if number is None else self._numbered(number)
        if tab is None:
            self._notes.add(f"there is no tab {number}; {len(self._tabs)} are open")
        elif len(self._tabs) == 1:
            self._notes.add("the only tab stays open")
        else:
            self._remove(tab)
            await _close(tab.page)
            await self._activate(self.active)

    async def list_tabs(self, title: str, url: str) -> tuple[OpenTab, ...]:
        """All tabs in order; of the active one title and URL are known. Empty where there is one at most."""
        if self._limit == 1:
            return ()
        titles = await asyncio.gather(*(_title(tab) for tab in self._tabs if tab is not self.active))
        others = iter(titles)
        return tuple(
            OpenTab(title, url, True)
            if tab is self.active
            else OpenTab(next(others), shorten(tab.page.url, 2000), False)
            for tab in self._tabs
        )

    def close(self) -> None:
        """Adopt and close nothing any more; the pages go with their context."""
        for task in (*self._adopting, *self._closing):
            task.cancel()
        if self._end is not None:
            self._end.cancel()

    def _numbered(self, number: int) -> Tab | None:
        return self._tabs[number - 1] if 1 <= number <= len(self._tabs) else None

    async def _activate(self, tab: Tab) -> None:
        self.active = tab
        await tab.page.bring_to_front()

    def _expect(self) -> None:
        if self._limit == 1:
            self._notes.add("a new window was closed; only one page can be open")
        else:
            self._announced += 1

    def _appeared(self, page: Page) -> None:
        self._announced = max(0, self._announced - (not self._opening))
        self._arrival.set()
        if self._opening:
            self._arrived.append(page)
        elif len(self._tabs) + len(self._adopting) < self._limit:
            self._notes.add("a new tab was opened")
            task = asyncio.get_running_loop().create_task(self._adopt(page))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)
        else:
            if self._limit > 1:  # else it was told when the window was announced
                self._notes.add(f"a new window was closed; no more than {self._limit} tabs can be open")
            task = asyncio.get_running_loop().create_task(_close(page))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _adopt(self, page: Page) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                self._newest = await self._add(page)
        except (PlaywrightError, TimeoutError):
            await _close(page)  # most likely it has closed itself again

    async def _add(self, page: Page) -> Tab:
        tab = await Tab.open(page, self._intrusions.on_navigation_request, self._expect)
        self._intrusions.attach(page, tab.cdp)
        page.on("crash", partial(self._crashed, tab))
        page.on("close", partial(self._closed, tab))
        self._tabs.append(tab)
        return tab

    def _crashed(self, tab: Tab, page: Page) -> None:
        tab.closed.set()
        if tab is self.active:
            self._lose(PageCrashed("the page's renderer process has crashed"))
        elif tab in self._tabs:
            self._remove(tab)
            self._notes.add("a tab in the background has crashed and was closed")

    def _closed(self, tab: Tab, page: Page) -> None:
        tab.closed.set()
        if tab not in self._tabs:
            return
        self._remove(tab)
        self._notes.add("a tab has closed itself")

    def _remove(self, tab: Tab) -> None:
        self._tabs.remove(tab)
        if not self._tabs:
            # When Chromium ends, its pages close first: the better reason is given time to arrive.
            ended = BrowserError("the page has closed itself, and no other tab is open")
            self._end = asyncio.get_running_loop().call_later(CLOSE_EVENT_SECONDS / 2, self._lose, ended)
        elif tab is self.active:
            self.active = self._tabs[-1]


async def _close(page: Page) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await page.close()
    except (PlaywrightError, TimeoutError):
        pass  # it goes with its context at the latest


async def _title(tab: Tab) -> str:
    try:
        async with asyncio.timeout(TITLE_SECONDS):
            return shorten(await tab.page.title(), MAX_TITLE)
    except (PlaywrightError, TimeoutError):
        return ""
