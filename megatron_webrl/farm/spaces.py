"""Gymnasium spaces of a web page and of what can be done on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pydantic import TypeAdapter

from megatron_webrl.browser.page.keys import is_key_chord
from megatron_webrl.farm import protocol
from megatron_webrl.types import COORDINATE_ACTION_KINDS, COORDINATE_RANGE, MARK_ACTION_KINDS, Action, ActionKind

_LETTERS = "abcdefghijklmnopqrstuvwxyz "
_KEYS = ("Enter", "Tab", "Escape", "ArrowDown", "ArrowUp")
_step = TypeAdapter(protocol.StepRequest)

# What an action of each kind cannot do without.
_NEEDED: dict[ActionKind, tuple[str, ...]] = {
    "left_click": ("place",),
    "click": ("place",),
    "double_click": ("place",),
    "right_click": ("place",),
    "hover": ("place",),
    "drag": ("place", "end"),
    "select_option": ("place", "text"),
    "type": ("text",),
    "answer": ("text",),
    "key": ("text",),
    "scroll": ("direction",),
    "navigate": ("url",),
    "switch_tab": ("tab",),
}
_PLACES = {"place": ("coordinate", "element_id"), "end": ("end_coordinate", "end_element_id")}


class TextSpace(spaces.Space[str]):
    """Any text. Gymnasium's own `Text` knows only texts of an alphabet, which pages do not keep to."""

    def __init__(self, max_sample_chars: int = 32, seed: int | np.random.Generator | None = None) -> None:
        self.max_sample_chars = max_sample_chars
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Texts are no numbers."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Some small letters."""
        letters = self.np_random.integers(len(_LETTERS), size=self.np_random.integers(self.max_sample_chars + 1))
        return "".join(_LETTERS[number] for number in letters)

    def contains(self, x: Any) -> bool:
        """Whether it is a text."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.max_sample_chars == self.max_sample_chars

    def __repr__(self) -> str:
        return "TextSpace()"


class ActionSpace(spaces.Space[str]):
    """JSON of `types.Action`: the kinds of one tool, each with what it needs."""

    def __init__(
        self, marks: bool, extra_actions: Sequence[str] = (), max_marks: int = 100, tabs: int = 5,
        seed: int | np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        """The settings browser.marks, browser.actions, browser.max_marks and browser.tabs."""
        self.marks, self.max_marks, self.tabs = marks, max_marks, tabs
        self.kinds = (*(MARK_ACTION_KINDS if marks else COORDINATE_ACTION_KINDS), *extra_actions)
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Actions are no numbers."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """An action of any kind, anywhere. With marks, its element need not be on the page, which is then told."""
        kind = self.kinds[self.np_random.integers(len(self.kinds))]
        fields: dict[str, Any] = {"kind": kind}
        for need in _NEEDED.get(kind, ()):  # type: ignore[call-overload]
            fields |= self._some(need, kind)
        if kind == "wait":
            fields["time"] = 0.0
        return _step.dump_json(protocol.StepRequest(**fields), exclude_none=True).decode()

    def contains(self, x: Any) -> bool:
        """Whether it is the JSON of an action that can be carried out."""
        try:
            action = self.parse(x)
        except ValueError:
            return False
        return action.kind != "key" or is_key_chord(action.text or "")

    def parse(self, text: Any) -> Action:
        """The action. Raises ValueError that names what is wrong."""
        if not isinstance(text, str):
            raise ValueError(f"an action is the JSON of one, not a {type(text).__name__}")
        action = protocol.load(_step, text.encode())
        if action.kind not in self.kinds:
            raise ValueError(f"kind: {action.kind} is not one of {', '.join(self.kinds)}")
        for need in _NEEDED.get(action.kind, ()):
            names = _PLACES.get(need, (need,))
            if all(getattr(action, name) is None for name in names):
                raise ValueError(f"{' or '.join(names)}: {action.kind} needs it")
        for field in ("coordinate", "end_coordinate"):
            place = getattr(action, field)
            if place is not None and not all(0 <= number <= COORDINATE_RANGE for number in place):
                raise ValueError(f"{field}: {list(place)} is not within 0..{COORDINATE_RANGE}")
        return action

    def _some(self, need: str, kind: str) -> dict[str, Any]:
        if need in _PLACES:
            at, element = _PLACES[need]
            if self.marks:
                return {element: int(self.np_random.integers(1, self.max_marks + 1))}
            return {at: tuple(int(n) for n in self.np_random.integers(COORDINATE_RANGE + 1, size=2))}
        if need == "tab":
            return {need: int(self.np_random.integers(1, self.tabs + 1))}
        choices = {"direction": ("up", "down"), "url": ("http://example.com/",), "text": ()}[need]
        if kind == "key":
            choices = _KEYS
        if choices:
            return {need: choices[self.np_random.integers(len(choices))]}
        return {need: _LETTERS[self.np_random.integers(len(_LETTERS))]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and vars(self)["kinds"] == other.kinds and other.marks == self.marks

    def __repr__(self) -> str:
        return f"ActionSpace({', '.join(self.kinds)})"


def observation_space(view: protocol.SessionSpec) -> spaces.Dict:
    """What `WebEnv` shows: screenshot uint8 [height, width, 3] and texts; elements and tabs where there are any."""
    pixels = spaces.Box(0, 255, (view.height, view.width, 3), np.uint8)
    shown: dict[str, spaces.Space[Any]] = {
        "screenshot": pixels, "instruction": TextSpace(), "url": TextSpace(), "title": TextSpace(), "error": TextSpace(),
        "page_changed": spaces.Discrete(2),
    }  # fmt: skip
    if view.marks:
        box = spaces.Box(np.iinfo(np.int32).min, np.iinfo(np.int32).max, (4,), np.int32)
        shown["elements"] = spaces.Sequence(
            spaces.Dict(
                id=spaces.Discrete(view.max_marks, start=1), role=TextSpace(), name=TextSpace(), value=TextSpace(), box=box,
                states=spaces.Sequence(TextSpace()), options=spaces.Sequence(TextSpace()),
            )
        )  # fmt: skip
    if "switch_tab" in view.actions:
        shown["tabs"] = spaces.Sequence(spaces.Dict(title=TextSpace(), url=TextSpace(), active=spaces.Discrete(2)))
    return spaces.Dict(shown)
