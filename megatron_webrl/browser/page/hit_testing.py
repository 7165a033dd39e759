"""Where things lie on a page: what is at a point, and at which point an element can be hit.

A page is drawn by one renderer, and frames from other sites by renderers of their own: a tree of views. All is asked
for over CDP, past the page's scripts, so frames, open and closed shadow roots are all seen, and no script can lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from playwright.async_api import CDPSession
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.page.dom_snapshot import DOMSnapshot
from megatron_webrl.browser.page.tab import ISOLATED_WORLD_NAME, Tab

MAX_FRAMES = 30
"""Frames that are looked into; a page with more of them is full of advertisements."""

MAX_NODES = 60_000
"""Documents of more nodes are not looked into: they would take seconds of the machine at each step."""

MIN_SIDE = 2.0  # pixels of an element that can be hit
Box = tuple[float, float, float, float]  # x, y, width, height in pixels of the viewport
Point = tuple[float, float]


class ElementUnavailable(Exception):
    """An element cannot be acted on; the message is for the agent."""


class PageTooLarge(ElementUnavailable):
    """The elements of a page cannot be told apart; the message is a sentence."""


@dataclass(frozen=True)
class DOMNode:
    """An element in one document of one view."""

    view: RendererView
    frame_id: str
    loader_id: str  # of its document: ids of nodes may come again in another one
    backend_node_id: int


class RendererView:
    """What one renderer draws. `refresh` comes first."""

    def __init__(self, cdp: CDPSession, parent: RendererView | None) -> None:
        self.cdp, self.parent = cdp, parent
        self.children: dict[int, RendererView] = {}  # by the id of the element that shows them
        self.left = self.top = 0.0  # of its viewport in the page's
        self.loader_ids: dict[str, str] = {}  # of the document of each frame
        self.root_frame_id = ""
        self.snapshot = DOMSnapshot({"strings": [], "documents": [_EMPTY]})

    async def refresh(self) -> None:
        """See the documents as they are.

        Raises PlaywrightError if the renderer or its place on the page has gone, TooLarge.
        """
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
            await self.cdp.send("HeapProfiler.collectGarbage")  # nodes of documents that are gone do not count
            nodes = await self._nodes()
            if nodes > MAX_NODES:
                raise PageTooLarge(f"elements cannot be found in a page of {nodes} nodes; {MAX_NODES} are the most")

    async def _nodes(self) -> int:
        return int((await self.cdp.send("Memory.getDOMCounters"))["nodes"])

    async def boxes(self, node: int) -> list[Box]:
        """The parts of an element on the page, the largest first; none if it is not shown."""
        try:
            answer = await self.cdp.send("DOM.getContentQuads", {"backendNodeId": node})
        except PlaywrightError:
            return []
        found = []
        for quad in answer["quads"]:
            xs, ys = quad[0::2], quad[1::2]
            found.append((self.left + min(xs), self.top + min(ys), max(xs) - min(xs), max(ys) - min(ys)))
        return sorted(found, key=lambda box: -box[2] * box[3])

    async def hit_test(self, x: float, y: float) -> tuple[int, str] | None:
        """The node at a point of the page, and its frame."""
        left, top = self.snapshot.scroll
        try:
            place = {"x": int(x - self.left + left), "y": int(y - self.top + top)}
            answer = await self.cdp.send("DOM.getNodeForLocation", place)
        except PlaywrightError:
            return None
        return int(answer["backendNodeId"]), str(answer["frameId"])


class RendererTree:
    """All views of a tab, the page's own first."""

    def __init__(self, tab: Tab, size: tuple[int, int]) -> None:
        self.main = RendererView(tab.cdp, None)
        self.views = [self.main]
        self._tab, self._size = tab, size

    @classmethod
    async def open(cls, tab: Tab, size: tuple[int, int]) -> RendererTree:
        """Look at a tab whose viewport has `size` in pixels.

        Raises PlaywrightError if it is being replaced, TooLarge.
        """
        views = cls(tab, size)
        await views.main.refresh()
        frames = tab.page.frames[1 : MAX_FRAMES + 1]
        sessions = await asyncio.gather(
            *(tab.page.context.new_cdp_session(frame) for frame in frames), return_exceptions=True
        )
        of = {tab.page.main_frame: views.main}
        for frame, session in zip(frames, sessions, strict=True):
            parent = of.get(frame.parent_frame) if frame.parent_frame else None
            if parent is None:
                continue
            if isinstance(session, BaseException):  # it is drawn by its parent's renderer
                of[frame] = parent
                continue
            view = RendererView(session, parent)
            views.views.append(view)
            try:
                await view.refresh()
                of[frame] = view
            except (PlaywrightError, PageTooLarge):
                continue  # it is not shown, has just gone, or is a world of its own
        return views

    async def close(self) -> None:
        """Let go of the other renderers."""
        await asyncio.gather(*(view.cdp.detach() for view in self.views[1:]), return_exceptions=True)

    async def hit_test(self, x: float, y: float) -> DOMNode | None:
        """The element at a point of the viewport, in whichever view."""
        view = self.main
        while True:
            found = await view.hit_test(x, y)
            if found is None:
                return None
            node, frame = found
            inner = view.children.get(node)
            if inner is None:
                return DOMNode(view, frame, view.loader_ids.get(frame, ""), node)
            view = inner

    async def locate(self, node: DOMNode) -> tuple[Box, Point] | None:
        """The visible part of an element, and a point where it and nothing else is hit; None if there is none."""
        for box in await node.view.boxes(node.backend_node_id):
            part = self._clipped(box)
            if part is None:
                continue
            for point in _points(part):
                hit = await self.hit_test(*point)
                if (
                    hit is not None
                    and hit.view is node.view
                    and node.backend_node_id in hit.view.snapshot.self_and_ancestors(hit.backend_node_id)
                ):
                    return part, point
        return None

    async def click_point(self, node: DOMNode) -> Point:
        """Where an element can be hit at this moment. Raises Unavailable, with words for the agent."""
        try:
            for view in reversed(list(_outwards(node.view))):  # a frame's place follows from that of its parent
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
        found = await self.locate(node)
        if found is None:
            raise ElementUnavailable("is hidden or covered")
        return found[1]

    async def call_function(self, node: DOMNode, function: str, *arguments: Any) -> Any:
        """What a function of JavaScript returns with the element as `this`, out of reach of the page's scripts.

        Raises PlaywrightError.
        """
        cdp = node.view.cdp
        world = await cdp.send("Page.createIsolatedWorld", {"frameId": node.frame_id, "worldName": ISOLATED_WORLD_NAME})
        context = {"backendNodeId": node.backend_node_id, "executionContextId": world["executionContextId"]}
        element = (await cdp.send("DOM.resolveNode", context))["object"]["objectId"]
        answer = await cdp.send(
            "Runtime.callFunctionOn",
            {
                "functionDeclaration": function,
                "objectId": element,
                "arguments": [{"value": argument} for argument in arguments],
                "returnByValue": True,
            },
        )
        if "exceptionDetails" in answer:
            raise PlaywrightError(f"a script failed: {answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    def may_be_visible(self, node: DOMNode) -> bool:
        """Whether an element could be in view, by its place in its own frame; cheap, and true too often."""
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
    here: RendererView | None = view
    while here is not None:
        yield here
        here = here.parent


def _points(box: Box) -> Sequence[Point]:
    """The middle, then the middles of the four quarters."""
    x, y, width, height = box
    quarters = [(x + width * a, y + height * b) for b in (0.25, 0.75) for a in (0.25, 0.75)]
    return [(x + width / 2, y + height / 2), *quarters]


def _loaders(tree: dict[str, Any]) -> dict[str, str]:
    """The loader of each frame's document, in order."""
    found = {str(tree["frame"]["id"]): str(tree["frame"]["loaderId"])}
    for child in tree.get("childFrames", ()):
        found |= _loaders(child)
    return found


_EMPTY: dict[str, Any] = {
    "frameId": -1,
    "nodes": {"parentIndex": [], "backendNodeId": [], "nodeType": [], "nodeName": [], "nodeValue": []},
    "layout": {"nodeIndex": [], "bounds": []},
}  # fmt: skip
