"""The two tools of a policy: `computer_use` with coordinates, `web_interaction` with numbered elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import COORDINATE_ACTION_KINDS, COORDINATE_RANGE, MARK_ACTION_KINDS, ActionKind

ARGUMENT_ORDER = (
    "element_id", "coordinate", "end_element_id", "end_coordinate", "text", "direction", "time", "url", "tab",
)  # fmt: skip

# Arguments of each kind except "action": required, optional. A place is a coordinate or an element.
_ARGUMENTS: dict[ActionKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "left_click": (("place",), ()),
    "click": (("place",), ()),
    "type": (("text",), ("place",)),
    "hover": (("place",), ()),
    "scroll": (("direction",), ("place",)),
    "wait": ((), ("time",)),
    "go_back": ((), ()),
    "navigate": (("url",), ()),
    "answer": (("text",), ()),
    "double_click": (("place",), ()),
    "right_click": (("place",), ()),
    "drag": (("place", "end"), ()),
    "key": (("text",), ()),
    "select_option": (("place", "text"), ()),
    "new_tab": ((), ("url",)),
    "switch_tab": (("tab",), ()),
    "close_tab": ((), ("tab",)),
}
_MEANINGS: dict[ActionKind, str] = {
    "left_click": "click at {place}",
    "click": "click {place}",
    "type": "click {at} if it is given, replace what the field holds by text, and press Enter",
    "hover": "move the mouse to {place}",
    "scroll": "move by almost one screen in direction, {at} if it is given",
    "wait": "do nothing for time seconds",
    "go_back": "return to the page before",
    "navigate": "open url",
    "answer": "end the task with text as the final answer",
    "double_click": "click twice {at}",
    "right_click": "click with the right button {at}",
    "drag": "press the button {at}, move to {end}, release it",
    "key": "press the keys that text names, such as Enter, ArrowDown or Control+a",
    "select_option": "choose the option with the label text in the list {at}",
    "new_tab": "open an empty tab, or url in it",
    "switch_tab": "show the tab with the number tab",
    "close_tab": "close the tab with the number tab, or the one that is shown",
}


@dataclass(frozen=True)
class Toolset:
    """One of the two tools, with the extra actions that are enabled."""

    marks: bool = False
    extra_actions: tuple[ActionKind, ...] = ()

    @classmethod
    def from_config(cls, settings: BrowserConfig) -> Toolset:
        return cls(settings.marks, cast(tuple[ActionKind, ...], tuple(settings.actions)))

    @property
    def tool_name(self) -> str:
        return "web_interaction" if self.marks else "computer_use"

    @property
    def action_kinds(self) -> tuple[ActionKind, ...]:
        return tuple(
            dict.fromkeys((*(MARK_ACTION_KINDS if self.marks else COORDINATE_ACTION_KINDS), *self.extra_actions))
        )

    def argument_names(self, kind: ActionKind) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of an action's arguments: required, optional."""
        required, optional = _ARGUMENTS[kind]
        return tuple(map(self._named, required)), tuple(map(self._named, optional))

    @property
    def compact_schema(self) -> str:
        """A replacement of the schema for small models, which learn the arguments from demonstrations."""
        return f"{self.tool_name}: {', '.join(self.action_kinds)}"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as JSON Schema."""
        properties = {name: self._property(name) for name in ARGUMENT_ORDER if self._users(name)}
        action = {
            "type": "string",
            "enum": list(self.action_kinds),
            "description": " ".join(f"{kind}: {self._meaning(kind)}." for kind in self.action_kinds),
        }
        return {
            "type": "function",
            "function": {
                "name": self.tool_name,
                "description": self._description,
                "parameters": {
                    "type": "object",
                    "properties": {"action": action, **properties},
                    "required": ["action"],
                },
            },
        }

    @property
    def _description(self) -> str:
        if self.marks:
            return (
                "Act on the web page shown in the screenshot. Elements go by the numbers that the screenshot shows at "
                "their boxes; the numbers change with every screenshot."
            )
        return (
            "Act on the web page shown in the screenshot. Coordinates are integers from 0 to "
            f"{COORDINATE_RANGE} on both axes, [0, 0] at the top left, whatever the size of the page in pixels."
        )

    def _named(self, argument: str) -> str:
        names = {"place": "element_id", "end": "end_element_id"} if self.marks else _COORDINATE_NAMES
        return names.get(argument, argument)

    def _meaning(self, kind: ActionKind) -> str:
        place, end = self._named("place"), self._named("end")
        at = f"on {place}" if self.marks else f"at {place}"
        return _MEANINGS[kind].format(place=place, end=end, at=at)

    def _users(self, argument: str) -> list[str]:
        return [kind for kind in self.action_kinds if argument in sum(self.argument_names(kind), ())]

    def _property(self, argument: str) -> dict[str, Any]:
        users = _listed(self._users(argument))
        if argument in ("coordinate", "end_coordinate"):
            items = {"type": "integer", "minimum": 0, "maximum": COORDINATE_RANGE}
            return {"type": "array", "items": items, "description": f"[x, y], for {users}."}
        if argument in ("element_id", "end_element_id", "tab"):
            return {"type": "integer", "minimum": 1, "description": f"For {users}."}
        if argument == "direction":
            return {"type": "string", "enum": ["up", "down"], "description": f"For {users}."}
        if argument == "time":
            return {"type": "number", "description": f"Seconds, for {users}."}
        return {"type": "string", "description": f"For {users}."}


_COORDINATE_NAMES = {"place": "coordinate", "end": "end_coordinate"}
COORDINATE_TOOLSET = Toolset()


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if names[:-1] else []), names[-1]])
