"""Hit testing over CDP: the node at a point, and a point at which an element can be clicked.

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

from megatron_webrl.browser.page.dom_snapshot import DOMSnapshot
from megatron_webrl.browser.page.tab import Tab, open_isolated_world, script_result

MAX_FRAMES = 30  # inspected; a page with more is full of advertisements
MAX_NODES = 60_000  # larger documents are not inspected: that would take seconds of CPU time at each step
MIN_SIDE = 2.0  # pixels; smaller elements cannot be hit
Box = tuple[float, float, float, float]  # x, y, width, height in pixels of the viewport
Point = tuple[float, float]


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
        self.loader_ids: dict[str, str] = {}  # by frame id
        self.root_frame_id = ""
        self.snapshot = DOMSnapshot({"strings": [], "documents": [_EMPTY]})

    async def refresh(self) -> None:
        """Capture the documents. Raises PageTooLarge, PlaywrightError if the renderer or its frame element is gone."""
        await self._check_size()
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

    async def _check_size(self) -> None:
        if await self._nodes() > MAX_NODES:
            await self.cdp.send("HeapProfiler.collectGarbage")  # nodes of closed documents do not count
            nodes = await self._nodes()
            if nodes > MAX_NODES:
                raise PageTooLarge(f"elements cannot be found in a page of {nodes} nodes; {MAX_NODES} are the most")

    async def _nodes(self) -> int:
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
            tree.views.append(view)
            try:
                await view.refresh()
                views[frame] = view
            except (PlaywrightError, PageTooLarge):
                continue  # not displayed, closed in the meantime, or too large
        return tree

    async def close(self) -> None:
        """Detach from the other renderers."""
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
            for view in reversed(list(_outwards(node.view))):  # the position of a frame depends on its parent's
                await view.refresh()
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


def _outwards(view: RendererView) -> Iterator[RendererView]:
    current: RendererView | None = view
    while current is not None:
        yield current
        current = current.parent


def _points(box: Box) -> Sequence[Point]:
    """The centre of a box, then the centres of its quarters."""
    x, y, width, height = box
    quarters = [(x + width * a, y + height * b) for b in (0.25, 0.75) for a in (0.25, 0.75)]
    return [(x + width / 2, y + height / 2), *quarters]


def _loaders(tree: dict[str, Any]) -> dict[str, str]:
    """Loader id by frame id, in document order."""
    loaders = {str(tree["frame"]["id"]): str(tree["frame"]["loaderId"])}
    for child in tree.get("childFrames", ()):
        loaders |= _loaders(child)
    return loaders


_EMPTY: dict[str, Any] = {
    "frameId": -1,
    "nodes": {"parentIndex": [], "backendNodeId": [], "nodeType": [], "nodeName": [], "nodeValue": []},
    "layout": {"nodeIndex": [], "bounds": []},
}  # fmt: skip
