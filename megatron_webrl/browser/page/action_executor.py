"""Execute actions with mouse, keyboard and tabs."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from playwright.async_api import Error as PlaywrightError
from playwright.async_api import Page

from megatron_webrl.browser.egress.egress_policy import NetworkAccess
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.page.elements import DOMNode, ElementUnavailable, Marks, Point, RendererTree
from megatron_webrl.browser.page.keys import is_key_chord
from megatron_webrl.browser.page.tabs import DocumentReplaced, StepMessages, Tabs, page_script, shorten
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import COORDINATE_ACTION_KINDS, COORDINATE_RANGE, MARK_ACTION_KINDS, Action

SCROLL_OVERLAP = 50  # pixels that stay in view
WAIT_SECONDS = 1.0  # of a wait action without `time`
MAX_WAIT_SECONDS = 5.0
COMMIT_SECONDS = 20.0  # for a site to respond to a navigation
DRAG_STEPS = 8  # mouse positions along the way
MAX_URL = 200  # characters of a URL in a message
T = TypeVar("T")
_FOCUSED_TEXT_LENGTH, _SELECT_OPTION = page_script("focused_text_length"), page_script("select_option")


class ActionExecutor:
    """Acts on the active tab; adds a message for what an action could not do."""

    def __init__(self, tabs: Tabs, settings: BrowserConfig, messages: StepMessages, network: NetworkAccess) -> None:
        self._tabs, self._settings, self._messages, self._network = tabs, settings, messages, network
        basic = {*COORDINATE_ACTION_KINDS, *(MARK_ACTION_KINDS if settings.marks else ())}
        self._enabled = basic | set(settings.actions)
        self._marks: Marks | None = None

    async def execute(self, action: Action, marks: Marks | None) -> None:
        """Execute an action on observed `marks`. Raises ValueError (missing argument), PlaywrightError (page lost)."""
        if action.kind not in self._enabled:
            self._messages.add(f"{action.kind} is not enabled (browser.actions)")
            return
        self._marks, tab = marks, self._tabs.active
        try:
            await self._dispatch(action)
        except ElementUnavailable as error:
            self._messages.add(str(error))
        except PlaywrightError:
            if not await self._tabs.was_closed(tab):
                raise

    async def _dispatch(self, action: Action) -> None:
        match action.kind:
            case "left_click" | "click" | "double_click" | "right_click":
                await self._click(action)
            case "hover":
                await self._page.mouse.move(*await self._required_point(action))
            case "drag":
                await self._drag(action)
            case "scroll":
                await self._scroll(action)
            case "type":
                await self._type(action)
            case "key":
                if action.text is None or not is_key_chord(action.text):
                    raise ValueError(f"{action} needs the name of a key, such as Enter or Control+a")
                await self._page.keyboard.press(action.text)
            case "select_option":
                await self._select(action)
            case "wait":
                await asyncio.sleep(min(WAIT_SECONDS if action.time is None else action.time, MAX_WAIT_SECONDS))
            case "go_back":
                await self._go_back()
            case "navigate":
                url = _required(action, action.url)
                if self._is_allowed(url):
                    await self._open_url(url)
            case "new_tab":
                allowed = action.url is None or self._is_allowed(action.url)
                if allowed and await self._tabs.open_tab() is not None and action.url is not None:
                    await self._open_url(action.url)
            case "switch_tab":
                await self._tabs.switch_to(_required(action, action.tab))
            case "close_tab":
                await self._tabs.close_tab(action.tab)
            case "answer":
                pass  # ends the episode without acting on the page

    # Mouse

    async def _click(self, action: Action) -> None:
        x, y = await self._required_point(action)
        await self._page.mouse.click(
            x, y,
            button="right" if action.kind == "right_click" else "left",
            click_count=2 if action.kind == "double_click" else 1,
        )  # fmt: skip

    async def _drag(self, action: Action) -> None:
        start = await self._required_point(action)
        end = _required(action, await self._point(action.end_coordinate, action.end_element_id))
        await self._page.mouse.move(*start)
        await self._page.mouse.down()
        await self._page.mouse.move(*end, steps=DRAG_STEPS)
        await self._page.mouse.up()

    async def _scroll(self, action: Action) -> None:
        direction = _required(action, action.direction)
        centre = self._pixel((COORDINATE_RANGE // 2, COORDINATE_RANGE // 2))
        await self._page.mouse.move(*(await self._point(action.coordinate, action.element_id) or centre))
        distance = max(self._settings.height - SCROLL_OVERLAP, SCROLL_OVERLAP)
        await self._page.mouse.wheel(0, distance if direction == "down" else -distance)

    # Keyboard and fields

    async def _type(self, action: Action) -> None:
        text = _required(action, action.text)
        point = await self._point(action.coordinate, action.element_id)
        if point is not None:
            await self._page.mouse.click(*point)
            await settle.wait_until_idle(self._tabs.active)
        try:
            length = await self._tabs.active.evaluate(_FOCUSED_TEXT_LENGTH)
        except DocumentReplaced:
            length = None
        if length is None:
            self._messages.add("no text field has the focus")
            return
        if length:
            await self._page.keyboard.press("ControlOrMeta+a")
            await self._page.keyboard.press("Backspace")
        await self._page.keyboard.type(text)
        await self._page.keyboard.press("Enter")

    async def _select(self, action: Action) -> None:
        text = _required(action, action.text)
        x, y = await self._required_point(action)
        fresh = None
        try:
            if self._marks is not None and action.element_id is not None:
                tree: RendererTree = self._marks.renderer_tree
                node: DOMNode | None = self._marks.node(action.element_id)
            else:
                tree = fresh = await RendererTree.open(self._tabs.active, (self._settings.width, self._settings.height))
                node = await tree.hit_test(x, y)
            problem = await tree.call_function(node, _SELECT_OPTION, text) if node else "this is no list of options"
        except PlaywrightError as error:
            problem = shorten(error.message, MAX_URL)
        finally:
            if fresh is not None:
                await fresh.close()
        if problem:
            self._messages.add(f'"{shorten(text, 80)}" was not selected: {problem}')

    # History and tabs

    async def _go_back(self) -> None:
        history = await self._tabs.active.cdp.send("Page.getNavigationHistory")
        if history["currentIndex"] <= 0:
            self._messages.add("there is no earlier page")
            return
        try:
            async with asyncio.timeout(COMMIT_SECONDS):
                await self._page.go_back(wait_until="commit", timeout=0)
        except TimeoutError:
            await self._tabs.active.cdp.send("Page.stopLoading")
            self._messages.add(f"the earlier page did not answer within {COMMIT_SECONDS:g} s")

    def _is_allowed(self, url: str) -> bool:
        refusal = self._network.refusal_reason(url)
        if refusal is not None:
            self._messages.add(f"{url[:MAX_URL]} may not be opened: {refusal}")
        return refusal is None

    async def _open_url(self, url: str) -> None:
        problem = await self._tabs.active.navigate(url, COMMIT_SECONDS)
        if problem:
            self._messages.add(f"{url[:MAX_URL]} cannot be opened: {problem}")

    # Points

    @property
    def _page(self) -> Page:
        return self._tabs.active.page

    async def _required_point(self, action: Action) -> Point:
        return _required(action, await self._point(action.coordinate, action.element_id))

    async def _point(self, coordinate: tuple[int, int] | None, element_id: int | None) -> Point | None:
        """Pixels of a coordinate or an element; None if neither is given. Raises ElementUnavailable."""
        if coordinate is not None:
            return self._pixel(coordinate)
        if element_id is None:
            return None
        if self._marks is None:
            raise ElementUnavailable(f"element {element_id} is not in the observation: nothing is numbered in it")
        try:
            return await self._marks.renderer_tree.click_point(self._marks.node(element_id))
        except ElementUnavailable as error:
            raise ElementUnavailable(f"element {element_id} {error}") from None

    def _pixel(self, coordinate: tuple[int, int]) -> Point:
        """Pixels of a coordinate in 0..COORDINATE_RANGE; COORDINATE_RANGE is the last pixel."""
        x, y = coordinate
        width, height = self._settings.width, self._settings.height
        return min(x * width / COORDINATE_RANGE, width - 1), min(y * height / COORDINATE_RANGE, height - 1)


def _required(action: Action, argument: T | None) -> T:
    """An argument of an action. Raises ValueError if it is missing."""
    if argument is None:
        raise ValueError(f"{action} lacks what its kind needs")
    return argument
