"""The elements of a page over CDP: which are in view (Set-of-Marks), the node at a point, and a point to click.

One renderer draws the page, further renderers draw frames from other sites: a tree of views. CDP bypasses the page's
scripts, so frames and open and closed shadow roots are included, and no script can forge the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from playwright.async_api import CDPSession
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.page.tabs import Tab, open_isolated_world, script_result, shorten
from megatron_webrl.types import Element

ELEMENT_NODE, TEXT_NODE = 1, 3  # DOM node types
MAX_OPTIONS = 20
MAX_CHARACTERS = 400
MAX_FRAMES = 30  # inspected; a page with more is full of advertisements
MAX_NODES = 60_000  # larger documents are not inspected: that would take seconds of CPU time at each step
MIN_SIDE = 2.0  # pixels; smaller elements cannot be hit
Box = tuple[float, float, float, float]  # x, y, width, height in pixels of the viewport
Point = tuple[float, float]
MAX_NAME = 80  # characters of a name, value or option
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


class DOMSnapshot:
    """Nodes are identified by backend ids; open and closed shadow roots and same-process frames are included."""

    def __init__(self, captured: dict[str, Any]) -> None:
        """`captured`: the response of DOMSnapshot.captureSnapshot."""
        self._strings: list[str] = captured["strings"]
        self._documents: list[dict[str, Any]] = captured["documents"]
        self.parent: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._names: dict[int, str] = {}  # of tags, upper case
        self._texts: dict[int, str] = {}  # of text nodes
        self.document_order: dict[int, int] = {}  # index in document order
        self.clickable: dict[int, str] = {}  # frame id by element with mouse listeners
        self.boxes: dict[int, Box] = {}  # in its frame's viewport
        owners: dict[int, int] = {}  # frame element by index of its document
        for outer in self._documents:
            inner = outer["nodes"].get("contentDocumentIndex", {"index": (), "value": ()})
            owners |= {
                document: self._ids(outer)[node] for node, document in zip(inner["index"], inner["value"], strict=True)
            }
        for index, document in enumerate(self._documents):
            self._read(document, owners.get(index))
        root = self._documents[0]
        self.scroll = (float(root.get("scrollOffsetX", 0)), float(root.get("scrollOffsetY", 0)))

    def self_and_ancestors(self, node: int) -> Iterator[int]:
        """Yield the node, then its ancestors from the inside out."""
        current: int | None = node
        while current is not None:
            yield current
            current = self.parent.get(current)

    def text(self, node: int) -> str:
        """The text of an element in document order, shortened."""
        text = ""
        for child in self._descendants(node):
            text = f"{text} {' '.join(self._texts.get(child, '').split())}".strip()
            if len(text) > MAX_CHARACTERS:
                break
        return text[:MAX_CHARACTERS]

    def options(self, node: int) -> tuple[str, ...]:
        """The first MAX_OPTIONS labels of a <select>; empty for other elements."""
        if self._names.get(node) != "SELECT":
            return ()
        options = [child for child in self._descendants(node) if self._names.get(child) == "OPTION"]
        return tuple(self.text(option).strip() for option in options[:MAX_OPTIONS])

    def _read(self, document: dict[str, Any], owner: int | None) -> None:
        nodes, ids = document["nodes"], self._ids(document)
        first = len(self.document_order)
        for index, (node, parent) in enumerate(zip(ids, nodes["parentIndex"], strict=True)):
            self.document_order[node] = first + index
            self._names[node] = self._string(nodes["nodeName"][index]).upper()
            if nodes["nodeType"][index] == TEXT_NODE:
                self._texts[node] = self._string(nodes["nodeValue"][index])
            above = ids[parent] if parent >= 0 else owner
            if above is not None:
                self.parent[node] = above
                self._children.setdefault(above, []).append(node)
        frame = self._string(document["frameId"])
        for index in nodes.get("isClickable", {}).get("index", ()):
            if nodes["nodeType"][index] == ELEMENT_NODE:
                self.clickable[ids[index]] = frame
        left, top = document.get("scrollOffsetX", 0), document.get("scrollOffsetY", 0)
        layout = document["layout"]
        for index, (x, y, width, height) in zip(layout["nodeIndex"], layout["bounds"], strict=True):
            self.boxes.setdefault(ids[index], (x - left, y - top, width, height))

    @staticmethod
    def _ids(document: dict[str, Any]) -> list[int]:
        return document["nodes"]["backendNodeId"]

    def _string(self, index: int) -> str:
        return self._strings[index] if index >= 0 else ""

    def _descendants(self, node: int) -> Iterator[int]:
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack += reversed(self._children.get(current, ()))


class ElementUnavailable(Exception):
    """An element cannot be acted on; the message is for the agent."""


class PageTooLarge(ElementUnavailable):
    """The page has too many nodes to number its elements; the message is a sentence for the agent."""


@dataclass(frozen=True)
class DOMNode:
    """A node of one document in one view."""

    view: RendererView
    frame_id: str
    loader_id: str  # of its document: another document may use the same node ids
    backend_node_id: int


class RendererView:
    """The documents drawn by one renderer. Call `refresh` first."""

    def __init__(self, cdp: CDPSession, parent: RendererView | None) -> None:
        self.cdp, self.parent = cdp, parent
        self.children: dict[int, RendererView] = {}  # by the backend node id of the frame element
        self.left = self.top = 0.0  # of its viewport within the page's
        self.loader_ids: dict[str, str]  # by frame id
        self.root_frame_id: str
        self.snapshot: DOMSnapshot

    async def refresh(self) -> None:
        """Capture the documents. Raises PageTooLarge, PlaywrightError if the renderer or its frame element is gone."""
        if await self._count_nodes() > MAX_NODES:
            await self.cdp.send("HeapProfiler.collectGarbage")  # nodes of closed documents do not count
            if (nodes := await self._count_nodes()) > MAX_NODES:
                raise PageTooLarge(f"elements cannot be found in a page of {nodes} nodes; {MAX_NODES} are the most")
        tree, captured = await asyncio.gather(
            self.cdp.send("Page.getFrameTree"), self.cdp.send("DOMSnapshot.captureSnapshot", {"computedStyles": []})
        )
        self.loader_ids, self.root_frame_id = _loaders(tree["frameTree"]), tree["frameTree"]["frame"]["id"]
        self.snapshot = await asyncio.to_thread(DOMSnapshot, captured)
        if self.parent is not None:
            owner = (await self.parent.cdp.send("DOM.getFrameOwner", {"frameId": self.root_frame_id}))["backendNodeId"]
            box = await self.parent.cdp.send("DOM.getBoxModel", {"backendNodeId": owner})
            x, y = box["model"]["content"][:2]
            self.left, self.top = self.parent.left + x, self.parent.top + y
            self.parent.children[owner] = self

    async def _count_nodes(self) -> int:
        return int((await self.cdp.send("Memory.getDOMCounters"))["nodes"])

    async def boxes(self, node: int) -> list[Box]:
        """Boxes of an element on the page, the largest first; empty if it is not displayed."""
        try:
            response = await self.cdp.send("DOM.getContentQuads", {"backendNodeId": node})
        except PlaywrightError:
            return []
        boxes = []
        for quad in response["quads"]:
            xs, ys = quad[0::2], quad[1::2]
            boxes.append((self.left + min(xs), self.top + min(ys), max(xs) - min(xs), max(ys) - min(ys)))
        return sorted(boxes, key=lambda box: -box[2] * box[3])

    async def hit_test(self, x: float, y: float) -> tuple[int, str] | None:
        """Backend id and frame id of the node at a point of the page."""
        left, top = self.snapshot.scroll
        try:
            location = {"x": int(x - self.left + left), "y": int(y - self.top + top)}
            response = await self.cdp.send("DOM.getNodeForLocation", location)
        except PlaywrightError:
            return None
        return int(response["backendNodeId"]), str(response["frameId"])


class RendererTree:
    """All views of a tab, the main one first."""

    def __init__(self, tab: Tab, size: tuple[int, int]) -> None:
        self.main = RendererView(tab.cdp, None)
        self.views = [self.main]
        self._tab, self._size = tab, size

    @classmethod
    async def open(cls, tab: Tab, size: tuple[int, int]) -> RendererTree:
        """Capture all views; `size`: viewport in pixels. Raises PageTooLarge, PlaywrightError (document replaced)."""
        tree = cls(tab, size)
        await tree.main.refresh()
        frames = tab.page.frames[1 : MAX_FRAMES + 1]
        sessions = await asyncio.gather(
            *(tab.page.context.new_cdp_session(frame) for frame in frames), return_exceptions=True
        )
        views = {tab.page.main_frame: tree.main}
        for frame, session in zip(frames, sessions, strict=True):
            parent = views.get(frame.parent_frame) if frame.parent_frame else None
            if parent is None:
                continue
            if isinstance(session, BaseException):  # drawn by the renderer of its parent
                views[frame] = parent
                continue
            view = RendererView(session, parent)
            try:
                await view.refresh()
            except (PlaywrightError, PageTooLarge):  # not displayed, closed in the meantime, or too large
                await asyncio.gather(session.detach(), return_exceptions=True)
                continue
            tree.views.append(view)
            views[frame] = view
        return tree

    async def close(self) -> None:
        await asyncio.gather(*(view.cdp.detach() for view in self.views[1:]), return_exceptions=True)

    async def hit_test(self, x: float, y: float) -> DOMNode | None:
        """The node at a point of the viewport, in any view."""
        view = self.main
        while True:
            hit = await view.hit_test(x, y)
            if hit is None:
                return None
            node, frame = hit
            inner = view.children.get(node)
            if inner is None:
                return DOMNode(view, frame, view.loader_ids.get(frame, ""), node)
            view = inner

    async def locate(self, node: DOMNode) -> tuple[Box, Point] | None:
        """The visible part of an element and a point at which it is hit; None if there is none."""
        for box in await node.view.boxes(node.backend_node_id):
            visible = self._clipped(box)
            if visible is None:
                continue
            for point in _points(visible):
                hit = await self.hit_test(*point)
                if (
                    hit is not None
                    and hit.view is node.view
                    and node.backend_node_id in hit.view.snapshot.self_and_ancestors(hit.backend_node_id)
                ):
                    return visible, point
        return None

    async def click_point(self, node: DOMNode) -> Point:
        """A point at which an element can be hit now. Raises ElementUnavailable with a message for the agent."""
        try:
            await _refresh_inwards(node.view)
        except PageTooLarge:
            raise ElementUnavailable("cannot be found again: the page has grown too large") from None
        except PlaywrightError:
            raise ElementUnavailable("is gone") from None
        if (
            node.view.loader_ids.get(node.frame_id) != node.loader_id
            or node.backend_node_id not in node.view.snapshot.document_order
        ):
            raise ElementUnavailable("is gone")
        location = await self.locate(node)
        if location is None:
            raise ElementUnavailable("is hidden or covered")
        return location[1]

    async def call_function(self, node: DOMNode, function: str, *arguments: Any) -> Any:
        """Call a JavaScript function with the element as `this`, isolated from page scripts. Raises PlaywrightError."""
        cdp = node.view.cdp
        world = await open_isolated_world(cdp, node.frame_id)
        target = {"backendNodeId": node.backend_node_id, "executionContextId": world}
        element = (await cdp.send("DOM.resolveNode", target))["object"]["objectId"]
        response = await cdp.send(
            "Runtime.callFunctionOn",
            {
                "functionDeclaration": function,
                "objectId": element,
                "arguments": [{"value": argument} for argument in arguments],
                "returnByValue": True,
            },
        )
        return script_result(response)

    def may_be_visible(self, node: DOMNode) -> bool:
        """Whether an element could be in view, by its box within its own frame; a cheap over-estimate."""
        box = node.view.snapshot.boxes.get(node.backend_node_id)
        if box is None:
            return False
        x, y, width, height = box
        return x < self._size[0] and y < self._size[1] and x + width > 0 and y + height > 0

    def _clipped(self, box: Box) -> Box | None:
        left, top = max(box[0], 0.0), max(box[1], 0.0)
        right, bottom = min(box[0] + box[2], float(self._size[0])), min(box[1] + box[3], float(self._size[1]))
        if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
            return None
        return left, top, right - left, bottom - top


async def _refresh_inwards(view: RendererView) -> None:
    if view.parent is not None:
        await _refresh_inwards(view.parent)  # the position of a frame depends on its parent's
    await view.refresh()


def _points(box: Box) -> Sequence[Point]:
    x, y, width, height = box
    quarters = [(x + width * a, y + height * b) for b in (0.25, 0.75) for a in (0.25, 0.75)]
    return [(x + width / 2, y + height / 2), *quarters]


def _loaders(tree: dict[str, Any]) -> dict[str, str]:
    """Loader id by frame id, in document order."""
    loaders = {str(tree["frame"]["id"]): str(tree["frame"]["loaderId"])}
    for child in tree.get("childFrames", ()):
        loaders |= _loaders(child)
    return loaders


@dataclass(frozen=True)
class _Candidate:
    node: DOMNode
    role: str
    name: str
    value: str
    states: tuple[str, ...]


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
    frames = list(view.loader_ids)[:MAX_FRAMES]
    trees = await asyncio.gather(*(_tree(view, frame) for frame in frames))
    return await asyncio.to_thread(_candidates, view, dict(zip(frames, trees, strict=True)))


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
    for node, frame in view.snapshot.clickable.items():
        if node not in candidates and _role(entries.get(node, {})) not in _NEVER:
            candidates[node] = _candidate(view, frame, node, entries.get(node, {}))
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
        if candidate.role in INTERACTIVE_ROLES
        or ((id(candidate.node.view), candidate.node.backend_node_id) not in containers and box[2] * box[3] <= large)
    ]


def _element(number: int, candidate: _Candidate, box: Box) -> Element:
    x, y, width, height = (round(side) for side in box)
    options = candidate.node.view.snapshot.options(candidate.node.backend_node_id)
    return Element(
        number, candidate.role, candidate.name, (x, y, width, height), candidate.value, candidate.states,
        tuple(shorten(option, MAX_NAME) for option in options),
    )  # fmt: skip


def _role(entry: dict[str, Any]) -> str:
    return str(entry.get("role", {}).get("value", "")).lower()


def _property(entry: dict[str, Any], name: str) -> Any:
    for item in entry.get("properties", ()):
        if item["name"] == name:
            value = item["value"].get("value")
            return value if isinstance(value, bool | str) else None
    return None
