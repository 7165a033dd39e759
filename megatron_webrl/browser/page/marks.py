"""Set-of-Marks: number the interactive elements in view, from the accessibility tree."""

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

MAX_NAME = 80  # characters of a name, value or option
MAX_TREE_NODES = 20_000  # larger documents are searched by markup: reading the accessibility tree takes seconds
CANDIDATES_PER_MARK = 4  # examined per available number; the rest of a huge page is skipped

INTERACTIVE_ROLES = frozenset({
    "button", "popupbutton", "togglebutton", "link", "tab", "treeitem", "disclosuretriangle",
    "disclosuretrianglegrouped", "checkbox", "radio", "switch", "slider", "spinbutton",
    "textbox", "searchbox", "combobox", "listbox", "option", "menulistpopup", "colorwell", "date", "datetime",
    "inputtime", "menuitem", "menuitemcheckbox", "menuitemradio",
})  # fmt: skip
_NEVER = frozenset({"rootwebarea", "iframe", "iframepresentational", "inlinetextbox", "linebreak"})
_LARGE = 0.5  # an element without an interactive role that covers more of the viewport is taken for a container

# Property of the accessibility tree -> text for its values; other values are not shown.
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
    def lacks_role(self) -> bool:
        """Whether it is a candidate only because of a mouse listener or because it can be focused."""
        return self.role not in INTERACTIVE_ROLES


class Marks:
    """The numbered elements of one observation; numbers are valid for that observation only."""

    def __init__(self, tree: RendererTree, elements: tuple[Element, ...], nodes: dict[int, DOMNode]) -> None:
        self.elements, self.renderer_tree = elements, tree
        self._nodes = nodes

    def node(self, number: int) -> DOMNode:
        """The node with a number. Raises ElementUnavailable."""
        if number not in self._nodes:
            raise ElementUnavailable("is not in the observation")
        return self._nodes[number]

    async def click_point(self, number: int) -> Point:
        """A point in pixels at which an element can be hit now. Raises ElementUnavailable."""
        return await self.renderer_tree.click_point(self.node(number))

    async def close(self) -> None:
        """Detach from the renderers."""
        await self.renderer_tree.close()


async def find_marks(tab: Tab, size: tuple[int, int], limit: int) -> Marks:
    """Number the first `limit` elements, in document order, that are in view and not covered.

    Raises PlaywrightError if the page is being replaced, PageTooLarge.
    """
    tree = await RendererTree.open(tab, size)
    try:
        by_view = await asyncio.gather(*(_view_candidates(view) for view in tree.views))
        candidates = [candidate for view in by_view for candidate in view if tree.may_be_visible(candidate.node)]
        candidates = candidates[: limit * CANDIDATES_PER_MARK]
        hits = await asyncio.gather(*(tree.locate(candidate.node) for candidate in candidates))
        visible = [(candidate, hit[0]) for candidate, hit in zip(candidates, hits, strict=True) if hit is not None]
        marked = list(enumerate(_without_containers(visible, size)[:limit], 1))
    except BaseException:
        await tree.close()
        raise
    elements = tuple(_element(number, candidate, box) for number, (candidate, box) in marked)
    return Marks(tree, elements, {number: candidate.node for number, (candidate, _) in marked})


async def _view_candidates(view: RendererView) -> list[_Candidate]:
    """The candidates of a view, by accessibility tree and mouse listeners, in document order."""
    if len(view.snapshot.document_order) > MAX_TREE_NODES:
        return await asyncio.to_thread(_candidates, view, _from_markup(view))
    frames = list(view.loader_ids)[:MAX_FRAMES]
    trees = await asyncio.gather(*(_tree(view, frame) for frame in frames))
    return await asyncio.to_thread(_candidates, view, dict(zip(frames, trees, strict=True)))


def _from_markup(view: RendererView) -> dict[str, list[dict[str, Any]]]:
    """Substitute for the accessibility trees, by frame: entries built from the markup."""
    trees: dict[str, list[dict[str, Any]]] = {}
    for element in view.snapshot.elements_by_markup():
        entry = {"backendDOMNodeId": element.node, "role": {"value": element.role}, "name": {"value": element.name}}
        trees.setdefault(element.frame, []).append(entry)
    return trees


def _candidates(view: RendererView, trees: dict[str, list[dict[str, Any]]]) -> list[_Candidate]:
    candidates: dict[int, _Candidate] = {}
    entries: dict[int, dict[str, Any]] = {}
    for frame, tree in trees.items():
        for entry in tree:
            node = entry.get("backendDOMNodeId")
            if node is None or node not in view.snapshot.document_order:
                continue
            entries[node] = entry
            if not entry.get("ignored") and _is_interactive(entry):
                candidates[node] = _candidate(view, frame, node, entry)
    for node in view.snapshot.clickable:
        if node not in candidates:
            entry = entries.get(node, {})
            if _role(entry) not in _NEVER:
                candidates[node] = _candidate(view, view.snapshot.clickable_frame_ids[node], node, entry)
    order = view.snapshot.document_order
    return sorted(candidates.values(), key=lambda candidate: order[candidate.node.backend_node_id])


async def _tree(view: RendererView, frame: str) -> list[dict[str, Any]]:
    try:
        return (await view.cdp.send("Accessibility.getFullAXTree", {"frameId": frame}))["nodes"]
    except PlaywrightError:
        if frame == view.root_frame_id:
            raise
        return []  # the frame has closed in the meantime


def _is_interactive(entry: dict[str, Any]) -> bool:
    role = _role(entry)
    return role in INTERACTIVE_ROLES or (role not in _NEVER and _property(entry, "focusable") is True)


def _candidate(view: RendererView, frame: str, node: int, entry: dict[str, Any]) -> _Candidate:
    states = [texts.get(_property(entry, name)) for name, texts in _STATES.items()]
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


def _without_containers(
    visible: Sequence[tuple[_Candidate, Box]], size: tuple[int, int]
) -> list[tuple[_Candidate, Box]]:
    """Drop candidates without an interactive role that contain other candidates or fill the page."""
    containers: set[tuple[int, int]] = set()
    for candidate, _ in visible:
        view = candidate.node.view
        _, *ancestors = view.snapshot.self_and_ancestors(candidate.node.backend_node_id)
        containers |= {(id(view), node) for node in ancestors}
    large = _LARGE * size[0] * size[1]
    return [
        (candidate, box)
        for candidate, box in visible
        if not candidate.lacks_role
        or ((id(candidate.node.view), candidate.node.backend_node_id) not in containers and box[2] * box[3] <= large)
    ]


def _element(number: int, candidate: _Candidate, box: Box) -> Element:
    x, y, width, height = (round(side) for side in box)
    options = candidate.node.view.snapshot.options(candidate.node.backend_node_id)
    element = Element(number, candidate.role, candidate.name, (x, y, width, height), candidate.value, candidate.states)
    return replace(element, options=tuple(shorten(option, MAX_NAME) for option in options))


def _role(entry: dict[str, Any]) -> str:
    return str(entry.get("role", {}).get("value", "")).lower()


def _property(entry: dict[str, Any], name: str) -> Any:
    for item in entry.get("properties", ()):
        if item["name"] == name:
            value = item["value"].get("value")
            return value if isinstance(value, bool | str) else None
    return None
