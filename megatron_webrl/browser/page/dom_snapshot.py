"""The documents of one renderer as DOMSnapshot tells them: who holds whom, what is clickable, what lies where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ELEMENT_NODE, TEXT_NODE = 1, 3  # kinds of nodes
MAX_OPTIONS = 20
MAX_CHARACTERS = 400
_ROLES = {
    "A": "link", "AREA": "link", "BUTTON": "button", "INPUT": "textbox", "TEXTAREA": "textbox", "SELECT": "combobox",
    "SUMMARY": "disclosuretriangle",
}  # fmt: skip
_NAMING = ("aria-label", "placeholder", "title", "alt", "value")


@dataclass(frozen=True)
class MarkupElement:
    """What the markup alone tells of an element."""

    node: int
    frame: str
    role: str
    name: str  # or empty


class DOMSnapshot:
    """Nodes go by their backend ids; shadow roots, open and closed, and frames of the same process are included."""

    def __init__(self, captured: dict[str, Any]) -> None:
        """`captured`: the answer of DOMSnapshot.captureSnapshot."""
        self._strings: list[str] = captured["strings"]
        self._documents: list[dict[str, Any]] = captured["documents"]
        self.parent: dict[int, int] = {}
        self.document_order: dict[int, int] = {}  # place in the document
        self.clickable: list[int] = []  # elements that listen to the mouse
        self.clickable_frame_ids: dict[int, str] = {}  # of each clickable element, the id of its frame
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
        """The node and everything that holds it, from the inside out."""
        here: int | None = node
        while here is not None:
            yield here
            here = self.parent.get(here)

    def text(self, node: int) -> str:
        """The text within an element, in order."""
        return " ".join(self._inside(node))[:MAX_CHARACTERS]

    def options(self, node: int) -> tuple[str, ...]:
        """The labels of the options of a <select>, the first ones; nothing for other elements."""
        if self._names.get(node) != "SELECT":
            return ()
        found = [child for child in self._below(node) if self._names.get(child) == "OPTION"]
        return tuple(self.text(option).strip() for option in found[:MAX_OPTIONS])

    def elements_by_markup(self) -> Iterator[MarkupElement]:
        """Elements whose tag or attributes say that they are there to be acted on, in order."""
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

    def _below(self, node: int) -> Iterator[int]:
        waiting = [node]
        while waiting:
            here = waiting.pop()
            yield here
            waiting += reversed(self._children.get(here, ()))

    def _inside(self, node: int) -> Iterator[str]:
        length = 0
        for child in self._below(node):
            words = " ".join(self._values.get(child, "").split())
            if words:
                yield words
                length += len(words)
            if length > MAX_CHARACTERS:
                return


def _pairs(rare: dict[str, list[int]] | None) -> tuple[list[int], list[int]]:
    return (rare["index"], rare["value"]) if rare else ([], [])
