"""Set-of-Marks: the elements in view that can be acted on, numbered, from the accessibility tree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.page.hit_testing import (
    MAX_FRAMES,
    Box,
    DOMNode,
    ElementUnavailable,
    Point,
    RendererTree,
    RendererView,
)
from megatron_webrl.browser.page.step_messages import shorten
from megatron_webrl.browser.page.tab import Tab
from megatron_webrl.types import Element

MAX_NAME = 80  # characters of a name, a value or an option
MAX_TREE_NODES = 20_000
"""The elements of a larger document are told by their markup: its accessibility tree takes seconds to read."""

CANDIDATES_PER_MARK = 4
"""Candidates that are looked at for each element that may be numbered; the rest of a gigantic page is left out."""

INTERACTIVE_ROLES = frozenset({
    "button", "popupbutton", "togglebutton", "link", "tab", "treeitem", "disclosuretriangle",
    "disclosuretrianglegrouped", "checkbox", "radio", "switch", "slider", "spinbutton",
    "textbox", "searchbox", "combobox", "listbox", "option", "menulistpopup", "colorwell", "date", "datetime",
    "inputtime", "menuitem", "menuitemcheckbox", "menuitemradio",
})  # fmt: skip
"""Roles that are there to be acted on."""

_NEVER = frozenset({"rootwebarea", "iframe", "iframepresentational", "inlinetextbox", "linebreak"})
_LARGE = 0.5
"""An element without such a role that covers more of the viewport is a container that listens for its contents."""

# Property of the accessibility tree -> words for its values; other values say nothing.
_STATES: dict[str, dict[Any, str]] = {
    "focused": {True: "focused"},
    "disabled": {True: "disabled"},
    "checked": {"true": "checked", "false": "not checked", "mixed": "partly checked"},
    "pressed": {"true": "pressed", "false": "not pressed", "mixed": "partly pressed"},
    "selected": {True: "selected"},
    "expanded": {True: "expanded", False: "collapsed"},
    "required": {True: "required"},
    "readonly": {True: "readonly"},
    "invalid": {"true": "invalid", "spelling": "invalid", "grammar": "invalid"},
}


@dataclass(frozen=True)
class _Candidate:
    node: DOMNode
    role: str
    name: str
    value: str
    states: tuple[str, ...]

    @property
    def plain(self) -> bool:
        """Whether only what it listens to or its focus says that it can be acted on."""
        return self.role not in INTERACTIVE_ROLES


class Marks:
    """The numbered elements of one observation; the numbers mean nothing in the next one."""

    def __init__(self, views: RendererTree, elements: tuple[Element, ...], nodes: dict[int, DOMNode]) -> None:
        self.elements, self.renderer_tree = elements, views
        self._nodes = nodes

    def node(self, number: int) -> DOMNode:
        """The element with a number. Raises Unavailable."""
        if number not in self._nodes:
            raise ElementUnavailable("is not in the observation")
        return self._nodes[number]

    async def click_point(self, number: int) -> Point:
        """Where an element can be hit at this moment, in pixels. Raises Unavailable."""
        return await self.renderer_tree.click_point(self.node(number))

    async def close(self) -> None:
        """Forget the elements."""
        await self.renderer_tree.close()


async def find_marks(tab: Tab, size: tuple[int, int], limit: int) -> Marks:
    """The first `limit` elements, in the order of the document, that are in view and not covered.

    Raises PlaywrightError if the page is being replaced, TooLarge.
    """
    views = await RendererTree.open(tab, size)
    try:
        listed = await asyncio.gather(*(_listed(view) for view in views.views))
        candidates = [found for of_view in listed for found in of_view if views.may_be_visible(found.node)]
        candidates = candidates[: limit * CANDIDATES_PER_MARK]
        places = await asyncio.gather(*(views.locate(found.node) for found in candidates))
        shown = [(found, place[0]) for found, place in zip(candidates, places, strict=True) if place is not None]
        shown = _without_containers(shown, size)[:limit]
    except BaseException:
        await views.close()
        raise
    elements = tuple(_element(number, found, box) for number, (found, box) in enumerate(shown, 1))
    return Marks(views, elements, {number: found.node for number, (found, _) in enumerate(shown, 1)})


async def _listed(view: RendererView) -> list[_Candidate]:
    """What a view's accessibility trees and listeners offer, in the order of the document."""
    if len(view.snapshot.document_order) > MAX_TREE_NODES:
        return await asyncio.to_thread(_offered, view, _from_markup(view))
    frames = list(view.loader_ids)[:MAX_FRAMES]
    trees = await asyncio.gather(*(_tree(view, frame) for frame in frames))
    return await asyncio.to_thread(_offered, view, dict(zip(frames, trees, strict=True)))


def _from_markup(view: RendererView) -> dict[str, list[dict[str, Any]]]:
    """By frame, what stands in for its accessibility tree."""
    trees: dict[str, list[dict[str, Any]]] = {}
    for found in view.snapshot.elements_by_markup():
        entry = {"backendDOMNodeId": found.node, "role": {"value": found.role}, "name": {"value": found.name}}
        trees.setdefault(found.frame, []).append(entry)
    return trees


def _offered(view: RendererView, trees: dict[str, list[dict[str, Any]]]) -> list[_Candidate]:
    found: dict[int, _Candidate] = {}
    described: dict[int, dict[str, Any]] = {}
    for frame, tree in trees.items():
        for entry in tree:
            node = entry.get("backendDOMNodeId")
            if node is None or node not in view.snapshot.document_order:
                continue
            described[node] = entry
            if not entry.get("ignored") and _offers(entry):
                found[node] = _candidate(view, frame, node, entry)
    for node in view.snapshot.clickable:
        if node not in found:
            entry = described.get(node, {})
            if _role(entry) not in _NEVER:
                found[node] = _candidate(view, view.snapshot.clickable_frame_ids[node], node, entry)
    return sorted(found.values(), key=lambda candidate: view.snapshot.document_order[candidate.node.backend_node_id])


async def _tree(view: RendererView, frame: str) -> list[dict[str, Any]]:
    try:
        return (await view.cdp.send("Accessibility.getFullAXTree", {"frameId": frame}))["nodes"]
    except PlaywrightError:
        if frame == view.root_frame_id:
            raise
        return []  # a frame that has just gone


def _offers(entry: dict[str, Any]) -> bool:
    role = _role(entry)
    return role in INTERACTIVE_ROLES or (role not in _NEVER and _property(entry, "focusable") is True)


def _candidate(view: RendererView, frame: str, node: int, entry: dict[str, Any]) -> _Candidate:
    states = [words.get(_property(entry, name)) for name, words in _STATES.items()]
    name = str(entry.get("name", {}).get("value") or view.snapshot.text(node))
    value = entry.get("value", {}).get("value")
    role = _role(entry)
    return _Candidate(
        DOMNode(view, frame, view.loader_ids.get(frame, ""), node),
        "clickable" if role in ("", "none", "generic") else role,
        shorten(name, MAX_NAME),
        "" if value is None else shorten(str(value), MAX_NAME),
        tuple(state for state in states if state is not None),
    )


def _without_containers(shown: Sequence[tuple[_Candidate, Box]], size: tuple[int, int]) -> list[tuple[_Candidate, Box]]:
    """Without those that merely hold others, or fill the page, and have no role of their own."""
    holders: set[tuple[int, int]] = set()
    for found, _ in shown:
        view = found.node.view
        _, *above = view.snapshot.self_and_ancestors(found.node.backend_node_id)
        holders |= {(id(view), node) for node in above}
    large = _LARGE * size[0] * size[1]
    return [
        (found, box)
        for found, box in shown
        if not found.plain
        or ((id(found.node.view), found.node.backend_node_id) not in holders and box[2] * box[3] <= large)
    ]


def _element(number: int, found: _Candidate, box: Box) -> Element:
    x, y, width, height = (round(side) for side in box)
    options = found.node.view.snapshot.options(found.node.backend_node_id)
    element = Element(number, found.role, found.name, (x, y, width, height), found.value, found.states)
    return replace(element, options=tuple(shorten(option, MAX_NAME) for option in options))


def _role(entry: dict[str, Any]) -> str:
    return str(entry.get("role", {}).get("value", "")).lower()


def _property(entry: dict[str, Any], name: str) -> Any:
    for found in entry.get("properties", ()):
        if found["name"] == name:
            value = found["value"].get("value")
            return value if isinstance(value, bool | str) else None
    return None
