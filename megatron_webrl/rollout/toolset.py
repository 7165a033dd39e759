"""The agent's tool: its schema, its actions, and the parser of calls.

Format actions as tool calls, and parse tool calls.

<tool_call>
{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [500, 320]}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from megatron_webrl.browser.page.keys import is_key_chord
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.rollout.responses import TOOL_CALL_CLOSE, TOOL_CALL_OPEN, split_calls, strip_thinking
from megatron_webrl.types import COORDINATE_ACTION_KINDS, COORDINATE_RANGE, MARK_ACTION_KINDS, Action, ActionKind
from megatron_webrl.util import strict_json
from megatron_webrl.util.text import shorten

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


MAX_RESPONSE_CHARS = 200_000
MAX_TEXT_CHARS = 4_000
MAX_LONG_ANSWER_CHARS = 10_000  # accepted by the lenient parser; more could exceed a browser server's request limit
MAX_URL_CHARS = 2_000
MAX_WAIT_SECONDS = 60.0
MAX_INDEX = 100_000  # of an element or a tab
MAX_DESCRIBED_CHARS = 80  # of an action's text or URL in the history


LENIENCIES = ("digit_string", "integral_float", "extra_argument", "url_scheme", "long_answer")
"""Names of the deviations that a lenient parser accepts: docs/tasks.md."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters and line breaks
_URL_WITHOUT_SCHEME = re.compile(
    r"(//)?([\w-]+(\.[\w-]+)+\.?|localhost|\[[0-9a-f:.]+\])(:[0-9]{1,5})?([/?#].*)?", re.IGNORECASE
)


class _Malformed(ValueError):
    """Its message is the name of a format error."""


def format_tool_call(action: Action, toolset: Toolset = COORDINATE_TOOLSET) -> str:
    """The tool call of an action, keys in fixed order. Raises ValueError: argument missing, or no such action."""
    if action.kind not in toolset.action_kinds:
        raise ValueError(f"{toolset.tool_name} has no {action.kind}; it has {', '.join(toolset.action_kinds)}")
    required, optional = toolset.argument_names(action.kind)
    arguments: dict[str, Any] = {"action": action.kind}
    for name in sorted(required + optional, key=ARGUMENT_ORDER.index):
        value = getattr(action, name)
        if value is not None:
            arguments[name] = list(value) if isinstance(value, tuple) else value
        elif name in required:
            raise ValueError(f"{action.kind} needs {name}: {action}")
    call = json.dumps({"name": toolset.tool_name, "arguments": arguments}, ensure_ascii=False)
    return f"{TOOL_CALL_OPEN}\n{call}\n{TOOL_CALL_CLOSE}"


def describe_action(action: Action) -> str:
    """A short description for the history, on one line: `type "abc" at [200, 300]`."""
    terms: list[str] = [action.kind]
    if action.text is not None:
        terms.append(json.dumps(shorten(action.text, MAX_DESCRIBED_CHARS), ensure_ascii=False))
    if action.url is not None:
        terms.append(shorten(action.url, MAX_DESCRIBED_CHARS))
    if action.direction is not None:
        terms.append(action.direction)
    if action.time is not None:
        terms.append(f"{action.time:g} s")
    if action.tab is not None:
        terms.append(str(action.tab))
    at = "at " if len(terms) > 1 else ""
    if action.coordinate is not None:
        terms.append(f"{at}{list(action.coordinate)}")
    if action.element_id is not None:
        terms.append(f"{at}element {action.element_id}")
    if action.end_coordinate is not None:
        terms.append(f"to {list(action.end_coordinate)}")
    if action.end_element_id is not None:
        terms.append(f"to element {action.end_element_id}")
    return " ".join(" ".join(terms).split())


@dataclass(frozen=True)
class ParsedCall:
    """The action of a response, or else its format error; exactly one is None."""

    action: Action | None
    format_error: str | None
    leniencies: tuple[str, ...] = ()  # of LENIENCIES, each once: what a strict parser would have refused


def parse_tool_call(response: str, toolset: Toolset = COORDINATE_TOOLSET, lenient: bool = False) -> ParsedCall:
    """Parse the one tool call of a response; `lenient` accepts the deviations that LENIENCIES names. Never raises.

    Thoughts are ignored, tool calls in them too; other text around the one tool call is allowed.
    """
    leniency = _Leniency(lenient)
    try:
        action = _parse(response, toolset, leniency)
    except _Malformed as error:
        return ParsedCall(None, str(error))
    return ParsedCall(action, None, tuple(leniency.used))


class _Leniency:
    """Accepts deviations if it is enabled, and notes their names."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.used: dict[str, None] = {}  # a set in order of first use

    def accepts(self, name: str) -> bool:
        if self.enabled:
            self.used[name] = None
        return self.enabled


def _parse(response: str, toolset: Toolset, leniency: _Leniency) -> Action:
    if len(response) > MAX_RESPONSE_CHARS:
        raise _Malformed("too_long")
    pieces = split_calls(strip_thinking(response))
    tags = pieces[1::2]
    if TOOL_CALL_OPEN not in tags:
        raise _Malformed("no_tool_call")
    first = tags.index(TOOL_CALL_OPEN)
    closings = tags[first + 1 :].count(TOOL_CALL_CLOSE)
    if tags.count(TOOL_CALL_OPEN) > 1 or closings > 1:
        raise _Malformed("several_tool_calls")
    if not closings:
        raise _Malformed("unclosed_tool_call")
    call = _load(pieces[2 * first + 2])
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        raise _Malformed("bad_call")
    if call["name"] != toolset.tool_name:
        raise _Malformed("unknown_tool")
    return _action(call["arguments"], toolset, leniency)


def _load(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or a number of thousands of digits
        raise _Malformed("bad_json") from error


def _action(arguments: dict[str, Any], toolset: Toolset, leniency: _Leniency) -> Action:
    if "action" not in arguments:
        raise _Malformed("missing_argument")
    kind = next((kind for kind in toolset.action_kinds if kind == arguments["action"]), None)
    if kind is None:
        raise _Malformed("unknown_action")
    required, optional = toolset.argument_names(kind)
    values = {name: value for name, value in arguments.items() if name in required + optional}
    if any(name not in values for name in required):
        raise _Malformed("missing_argument")
    if len(values) < len(arguments) - 1 and not leniency.accepts("extra_argument"):
        raise _Malformed("unexpected_argument")
    checks: dict[str, Callable[[Any], Any]] = {
        "coordinate": partial(_coordinate, leniency),
        "end_coordinate": partial(_coordinate, leniency),
        "element_id": partial(_number_from_one, "bad_element_id", leniency),
        "end_element_id": partial(_number_from_one, "bad_element_id", leniency),
        "text": _key if kind == "key" else partial(_answer, leniency) if kind == "answer" else _text,
        "direction": _direction,
        "time": _time,
        "url": partial(_url, leniency),
        "tab": partial(_number_from_one, "bad_tab", leniency),
    }
    return Action(kind, **{name: checks[name](value) for name, value in values.items()})


def _coordinate(leniency: _Leniency, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise _Malformed("bad_coordinate")
    x, y = (_integer(number, leniency) for number in value)
    if x is None or y is None or not (0 <= x <= COORDINATE_RANGE and 0 <= y <= COORDINATE_RANGE):
        raise _Malformed("bad_coordinate")
    return x, y


def _number_from_one(error: str, leniency: _Leniency, value: Any) -> int:
    """The number of an element or a tab."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,6}", value) and leniency.accepts("digit_string"):
        value = int(value)
    number = _integer(value, leniency)
    if number is None or not 1 <= number <= MAX_INDEX:
        raise _Malformed(error)
    return number


def _integer(value: Any, leniency: _Leniency) -> int | None:
    # type() instead of isinstance: in Python true and false are integers.
    if type(value) is float and value.is_integer() and leniency.accepts("integral_float"):
        return int(value)
    return value if type(value) is int else None


def _key(value: Any) -> str:
    if not isinstance(value, str) or not is_key_chord(value):
        raise _Malformed("bad_key")
    return value


def _answer(leniency: _Leniency, value: Any) -> str:
    long = isinstance(value, str) and len(value) > MAX_TEXT_CHARS
    return _text(value, MAX_LONG_ANSWER_CHARS if long and leniency.accepts("long_answer") else MAX_TEXT_CHARS)


def _text(value: Any, limit: int = MAX_TEXT_CHARS) -> str:
    if not isinstance(value, str) or len(value) > limit or not _is_unicode(value):
        raise _Malformed("bad_text")
    return value


def _direction(value: Any) -> str:
    if value not in ("up", "down"):
        raise _Malformed("bad_direction")
    return str(value)


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_WAIT_SECONDS:  # false for NaN
        raise _Malformed("bad_time")
    return value


def _url(leniency: _Leniency, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_URL_CHARS:
        raise _Malformed("bad_url")
    if not _is_unicode(value) or _CONTROL.search(value):
        raise _Malformed("bad_url")
    if _URL_WITHOUT_SCHEME.fullmatch(value.strip()) and leniency.accepts("url_scheme"):
        return f"https://{value.strip().removeprefix('//')}"
    return value


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON can express but no encoding can."""
    return not re.search("[\ud800-\udfff]", text)
