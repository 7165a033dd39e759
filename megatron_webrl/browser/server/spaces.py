"""Gymnasium spaces of the observations and actions of a web page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pydantic import TypeAdapter

from megatron_webrl.browser.page.keys import is_key_chord
from megatron_webrl.browser.server import protocol
from megatron_webrl.types import COORDINATE_ACTION_KINDS, COORDINATE_RANGE, MARK_ACTION_KINDS, Action, ActionKind

_LETTERS = "abcdefghijklmnopqrstuvwxyz "
_KEYS = ("Enter", "Tab", "Escape", "ArrowDown", "ArrowUp")
_step = TypeAdapter(protocol.StepRequest)
_REQUIRED: dict[ActionKind, tuple[str, ...]] = {  # required fields
    "left_click": ("start",),
    "click": ("start",),
    "double_click": ("start",),
    "right_click": ("start",),
    "hover": ("start",),
    "drag": ("start", "end"),
    "select_option": ("start", "text"),
    "type": ("text",),
    "answer": ("text",),
    "key": ("text",),
    "scroll": ("direction",),
    "navigate": ("url",),
    "switch_tab": ("tab",),
}
_POINTS = {"start": ("coordinate", "element_id"), "end": ("end_coordinate", "end_element_id")}


class TextSpace(spaces.Space[str]):
    """Any text. Gymnasium's own `Text` is limited to a fixed alphabet, which page texts exceed."""

    def __init__(self, max_sample_chars: int = 32, seed: int | np.random.Generator | None = None) -> None:
        self.max_sample_chars = max_sample_chars
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no numeric form."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Random lower-case letters and spaces."""
        letters = self.np_random.integers(len(_LETTERS), size=self.np_random.integers(self.max_sample_chars + 1))
        return "".join(_LETTERS[number] for number in letters)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.max_sample_chars == self.max_sample_chars

    def __repr__(self) -> str:
        return "TextSpace()"


class ActionSpace(spaces.Space[str]):
    """JSON of `types.Action`: the action kinds of one tool, each with its required fields."""

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
        """False: actions have no numeric form."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A random action. With marks, its element may not exist; the observation then has an error."""
        kind = self.kinds[self.np_random.integers(len(self.kinds))]
        fields: dict[str, Any] = {"kind": kind}
        for field in _REQUIRED.get(kind, ()):  # type: ignore[call-overload]
            fields |= self._sample_field(field, kind)
        if kind == "wait":
            fields["time"] = 0.0
        return _step.dump_json(protocol.StepRequest(**fields), exclude_none=True).decode()

    def contains(self, x: Any) -> bool:
        """Whether `x` is the JSON of an executable action."""
        try:
            action = self.parse(x)
        except ValueError:
            return False
        return action.kind != "key" or is_key_chord(action.text or "")

    def parse(self, text: Any) -> Action:
        """Parse and validate an action. Raises ValueError that names the invalid field."""
        if not isinstance(text, str):
            raise ValueError(f"an action is the JSON of one, not a {type(text).__name__}")
        action = protocol.load(_step, text.encode())
        if action.kind not in self.kinds:
            raise ValueError(f"kind: {action.kind} is not one of {', '.join(self.kinds)}")
        for field in _REQUIRED.get(action.kind, ()):
            names = _POINTS.get(field, (field,))
            if all(getattr(action, name) is None for name in names):
                raise ValueError(f"{' or '.join(names)}: {action.kind} needs it")
        return protocol.validate_action(action)

    def _sample_field(self, field: str, kind: str) -> dict[str, Any]:
        if field in _POINTS:
            coordinate, element = _POINTS[field]
            if self.marks:
                return {element: int(self.np_random.integers(1, self.max_marks + 1))}
            return {coordinate: tuple(int(n) for n in self.np_random.integers(COORDINATE_RANGE + 1, size=2))}
        if field == "tab":
            return {field: int(self.np_random.integers(1, self.tabs + 1))}
        choices = {"direction": ("up", "down"), "url": ("http://example.com/",), "text": ()}[field]
        if kind == "key":
            choices = _KEYS
        if choices:
            return {field: choices[self.np_random.integers(len(choices))]}
        return {field: _LETTERS[self.np_random.integers(len(_LETTERS))]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and vars(self)["kinds"] == other.kinds and other.marks == self.marks

    def __repr__(self) -> str:
        return f"ActionSpace({', '.join(self.kinds)})"


def observation_space(spec: protocol.SessionSpec) -> spaces.Dict:
    """Space of `WebEnv` observations: screenshot uint8 [height, width, 3], texts, and elements and tabs if enabled."""
    pixels = spaces.Box(0, 255, (spec.height, spec.width, 3), np.uint8)
    fields: dict[str, spaces.Space[Any]] = {
        "screenshot": pixels, "instruction": TextSpace(), "url": TextSpace(), "title": TextSpace(),
        "error": TextSpace(), "page_changed": spaces.Discrete(2),
    }  # fmt: skip
    if spec.marks:
        box = spaces.Box(np.iinfo(np.int32).min, np.iinfo(np.int32).max, (4,), np.int32)
        fields["elements"] = spaces.Sequence(
            spaces.Dict(
                id=spaces.Discrete(spec.max_marks, start=1), role=TextSpace(), name=TextSpace(), value=TextSpace(),
                box=box, states=spaces.Sequence(TextSpace()), options=spaces.Sequence(TextSpace()),
            )
        )  # fmt: skip
    if "switch_tab" in spec.actions:
        fields["tabs"] = spaces.Sequence(spaces.Dict(title=TextSpace(), url=TextSpace(), active=spaces.Discrete(2)))
    return spaces.Dict(fields)
