"""A CDP DOMSnapshot of one renderer: tree structure, clickable elements, boxes, text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ELEMENT_NODE, TEXT_NODE = 1, 3  # DOM node types
MAX_OPTIONS = 20
MAX_CHARACTERS = 400
_ROLES = {
    "A": "link", "AREA": "link", "BUTTON": "button", "INPUT": "textbox", "TEXTAREA": "textbox", "SELECT": "combobox",
    "SUMMARY": "disclosuretriangle",
}  # fmt: skip
_NAMING = ("aria-label", "placeholder", "title", "alt", "value")


@dataclass(frozen=True)
class MarkupElement:
    """An interactive element according to its markup alone."""

    node: int
    frame: str
    role: str
    name: str  # may be empty


class DOMSnapshot:
    """Nodes are identified by backend ids; open and closed shadow roots and same-process frames are included."""

    def __init__(self, captured: dict[str, Any]) -> None:
        """`captured`: the response of DOMSnapshot.captureSnapshot."""
        self._strings: list[str] = captured["strings"]
        self._documents: list[dict[str, Any]] = captured["documents"]
        self.parent: dict[int, int] = {}
        self.document_order: dict[int, int] = {}  # index in document order
        self.clickable: list[int] = []  # elements with mouse listeners
        self.clickable_frame_ids: dict[int, str] = {}  # by clickable element
        self.boxes: dict[int, tuple[float, float, float, float]] = {}  # x, y, width, height in its frame's viewport
        owners = {
            document: self._ids(outer)[node]
            for outer in self._documents
            for node, document in zip(*_pairs(outer["nodes"].get("contentDocumentIndex")), strict=True)
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
        return " ".join(self._texts(node))[:MAX_CHARACTERS]

    def options(self, node: int) -> tuple[str, ...]:
        """The first MAX_OPTIONS labels of a <select>; empty for other elements."""
        if self._names.get(node) != "SELECT":
            return ()
        options = [child for child in self._descendants(node) if self._names.get(child) == "OPTION"]
        return tuple(self.text(option).strip() for option in options[:MAX_OPTIONS])

    def elements_by_markup(self) -> Iterator[MarkupElement]:
        """Yield elements whose tag or role attribute marks them as interactive, in document order."""
        for document in self._documents:
            frame = self._string(document["frameId"])
            for node, flat in zip(self._ids(document), document["nodes"].get("attributes", ()), strict=False):
                attributes = {self._string(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
                role = self._string(attributes.get("role", -1)) or _ROLES.get(self._names[node], "")
                if role:
                    name = next((self._string(attributes[key]) for key in _NAMING if key in attributes), "")
                    yield MarkupElement(node, frame, role, name)

    def _read(self, document: dict[str, Any], owner: int | None) -> None:
        nodes, ids = document["nodes"], self._ids(document)
        first = len(self.document_order)
        for index, (node, parent) in enumerate(zip(ids, nodes["parentIndex"], strict=True)):
            self.document_order[node] = first + index
            above = ids[parent] if parent >= 0 else owner
            if above is not None:
                self.parent[node] = above
        frame = self._string(document["frameId"])
        for index in nodes.get("isClickable", {}).get("index", ()):
            if nodes["nodeType"][index] == ELEMENT_NODE:
                self.clickable.append(ids[index])
                self.clickable_frame_ids[ids[index]] = frame
        left, top = document.get("scrollOffsetX", 0), document.get("scrollOffsetY", 0)
        layout = document["layout"]
        for index, (x, y, width, height) in zip(layout["nodeIndex"], layout["bounds"], strict=True):
            self.boxes.setdefault(ids[index], (x - left, y - top, width, height))

    @staticmethod
    def _ids(document: dict[str, Any]) -> list[int]:
        return document["nodes"]["backendNodeId"]

    def _string(self, index: int) -> str:
        return self._strings[index] if index >= 0 else ""

    @cached_property
    def _names(self) -> dict[int, str]:
        return {
            node: self._string(name).upper()
            for document in self._documents
            for node, name in zip(self._ids(document), document["nodes"]["nodeName"], strict=True)
        }

    @cached_property
    def _values(self) -> dict[int, str]:
        return {
            node: self._string(value)
            for document in self._documents
            for node, kind, value in zip(
                self._ids(document), document["nodes"]["nodeType"], document["nodes"]["nodeValue"], strict=True
            )
            if kind == TEXT_NODE
        }

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node in sorted(self.parent, key=self.document_order.__getitem__):
            children.setdefault(self.parent[node], []).append(node)
        return children

    def _descendants(self, node: int) -> Iterator[int]:
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack += reversed(self._children.get(current, ()))

    def _texts(self, node: int) -> Iterator[str]:
        length = 0
        for child in self._descendants(node):
            text = " ".join(self._values.get(child, "").split())
            if text:
                yield text
                length += len(text)
            if length > MAX_CHARACTERS:
                return


def _pairs(sparse: dict[str, list[int]] | None) -> tuple[list[int], list[int]]:
    return (sparse["index"], sparse["value"]) if sparse else ([], [])
