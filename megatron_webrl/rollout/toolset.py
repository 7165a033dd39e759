"""The agent's tool: its schema, its actions, and how they are formatted and parsed as tool calls.

<tool_call>
{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [500, 320]}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
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

# Of each kind of action: required and optional arguments except "action", and its meaning. A place is a coordinate or
# an element.
_ACTIONS: dict[ActionKind, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "left_click": (("place",), (), "click at {place}"),
    "click": (("place",), (), "click {place}"),
    "type": (("text",), ("place",), "click {at} if it is given, replace what the field holds by text, and press Enter"),
    "hover": (("place",), (), "move the mouse to {place}"),
    "scroll": (("direction",), ("place",), "move by almost one screen in direction, {at} if it is given"),
    "wait": ((), ("time",), "do nothing for time seconds"),
    "go_back": ((), (), "return to the page before"),
    "navigate": (("url",), (), "open url"),
    "answer": (("text",), (), "end the task with text as the final answer"),
    "double_click": (("place",), (), "click twice {at}"),
    "right_click": (("place",), (), "click with the right button {at}"),
    "drag": (("place", "end"), (), "press the button {at}, move to {end}, release it"),
    "key": (("text",), (), "press the keys that text names, such as Enter, ArrowDown or Control+a"),
    "select_option": (("place", "text"), (), "choose the option with the label text in the list {at}"),
    "new_tab": ((), ("url",), "open an empty tab, or url in it"),
    "switch_tab": (("tab",), (), "show the tab with the number tab"),
    "close_tab": ((), ("tab",), "close the tab with the number tab, or the one that is shown"),
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
        kinds = MARK_ACTION_KINDS if self.marks else COORDINATE_ACTION_KINDS
        return tuple(dict.fromkeys((*kinds, *self.extra_actions)))

    def argument_names(self, kind: ActionKind) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of an action's arguments: required, optional."""
        required, optional, _ = _ACTIONS[kind]
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
        kind = "element_id" if self.marks else "coordinate"
        return {"place": kind, "end": f"end_{kind}"}.get(argument, argument)

    def _meaning(self, kind: ActionKind) -> str:
        place, end = self._named("place"), self._named("end")
        at = f"on {place}" if self.marks else f"at {place}"
        return _ACTIONS[kind][2].format(place=place, end=end, at=at)

    def _users(self, argument: str) -> list[str]:
        return [kind for kind in self.action_kinds if argument in sum(self.argument_names(kind), ())]

    def _property(self, argument: str) -> dict[str, Any]:
        *kinds, last = self._users(argument)
        users = f"{', '.join(kinds)} and {last}" if kinds else last
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


COORDINATE_TOOLSET = Toolset()

MAX_RESPONSE_CHARS = 200_000
MAX_TEXT_CHARS = 4_000
MAX_LONG_ANSWER_CHARS = 10_000  # accepted by the lenient parser; more could exceed a browser server's request limit
MAX_URL_CHARS = 2_000
MAX_WAIT_SECONDS = 60.0
MAX_INDEX = 100_000  # of an element or a tab
MAX_DESCRIBED_CHARS = 80  # of an action's text or URL in the history

LENIENCIES = ("digit_string", "integral_float", "extra_argument", "url_scheme", "long_answer")
REPAIRS = (
    "several_calls", "other_keys", "other_tool", "missing_argument", "box", "fraction", "out_of_range",
    "other_direction", "number_as_text",
)  # fmt: skip
ACCEPTED: dict[str, tuple[str, ...]] = {"strict": (), "lenient": LENIENCIES, "webgym": (*LENIENCIES, *REPAIRS)}
"""Names of the deviations that each rollout.action_parser accepts: docs/tasks.md."""
_REPLACED: dict[str, Any] = {"coordinate": [500, 500], "element_id": 1, "direction": "down", "text": "", "time": 2}

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters and line breaks
_URL_WITHOUT_SCHEME = re.compile(
    r"(//)?([\w-]+(\.[\w-]+)+\.?|localhost|\[[0-9a-f:.]+\])(:[0-9]{1,5})?([/?#].*)?", re.IGNORECASE
)


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
    text = None if action.text is None else json.dumps(shorten(action.text, MAX_DESCRIBED_CHARS), ensure_ascii=False)
    contents = (
        (text, "{}"), (action.url and shorten(action.url, MAX_DESCRIBED_CHARS), "{}"), (action.direction, "{}"),
        (action.time, "{:g} s"), (action.tab, "{}"),
    )  # fmt: skip
    terms = [form.format(value) for value, form in contents if value is not None]
    at = "at " if terms else ""
    places = (
        (action.coordinate and list(action.coordinate), at + "{}"), (action.element_id, at + "element {}"),
        (action.end_coordinate and list(action.end_coordinate), "to {}"), (action.end_element_id, "to element {}"),
    )  # fmt: skip
    terms += [form.format(value) for value, form in places if value is not None]
    return " ".join(" ".join([action.kind, *terms]).split())


@dataclass(frozen=True)
class ParsedCall:
    """The action of a response, or else its format error; exactly one is None."""

    action: Action | None
    format_error: str | None
    leniencies: tuple[str, ...] = ()  # of ACCEPTED, each once


def parse_tool_call(response: str, toolset: Toolset = COORDINATE_TOOLSET, parser: str = "strict") -> ParsedCall:
    """Parse the one tool call of a response with a parser of ACCEPTED. Never raises.

    Thoughts are ignored, tool calls in them too; other text around the one tool call is allowed.
    """
    call = _CallParser(toolset, ACCEPTED[parser])
    try:
        action = call.parse(response)
    except _Malformed as error:
        return ParsedCall(None, str(error))
    return ParsedCall(action, None, tuple(call.leniencies))


class _Malformed(ValueError):
    """Its message is the name of a format error."""


def _require(condition: bool, error: str) -> None:
    if not condition:
        raise _Malformed(error)


class _CallParser:
    """Parses one response, and notes the deviations that it accepts."""

    def __init__(self, toolset: Toolset, accepted: tuple[str, ...]) -> None:
        self._toolset, self._accepted = toolset, accepted
        self.leniencies: dict[str, None] = {}  # a set in order of first use

    def parse(self, response: str) -> Action:
        _require(len(response) <= MAX_RESPONSE_CHARS, "too_long")
        pieces = split_calls(strip_thinking(response))
        tags = pieces[1::2]
        _require(TOOL_CALL_OPEN in tags, "no_tool_call")
        first = tags.index(TOOL_CALL_OPEN)
        later = tags[first + 1 :]
        _require(later in ([], [TOOL_CALL_CLOSE]) or self._accepts("several_calls"), "several_tool_calls")
        _require(later[:1] == [TOOL_CALL_CLOSE], "unclosed_tool_call")
        try:
            call = strict_json.loads(pieces[2 * first + 2])
        except (ValueError, RecursionError) as error:  # ValueError: not JSON, or a number of thousands of digits
            raise _Malformed("bad_json") from error
        _require(isinstance(call, dict) and isinstance(call.get("arguments"), dict), "bad_call")
        _require(set(call) == {"name", "arguments"} or self._accepts("other_keys"), "bad_call")
        _require(call.get("name") == self._toolset.tool_name or self._accepts("other_tool"), "unknown_tool")
        return self._action(call["arguments"])

    def _action(self, arguments: dict[str, Any]) -> Action:
        _require("action" in arguments, "missing_argument")
        kind = next((kind for kind in self._toolset.action_kinds if kind == arguments["action"]), None)
        if kind is None:
            raise _Malformed("unknown_action")
        required, optional = self._toolset.argument_names(kind)
        values = {name: value for name, value in arguments.items() if name in required + optional}
        extra = len(values) < len(arguments) - 1
        if kind in ("type", "wait") and "missing_argument" in self._accepted:  # WebGym asks for a place and a time
            required += optional
        for name in required:
            if name not in values:
                _require(name in _REPLACED and self._accepts("missing_argument"), "missing_argument")
                values[name] = _REPLACED[name]
        _require(not extra or self._accepts("extra_argument"), "unexpected_argument")
        return Action(kind, **{name: self._value(kind, name, value) for name, value in values.items()})

    def _accepts(self, leniency: str) -> bool:
        if leniency not in self._accepted:
            return False
        self.leniencies[leniency] = None
        return True

    def _value(self, kind: ActionKind, name: str, value: Any) -> Any:
        """A valid value of an argument."""
        match name:
            case "coordinate" | "end_coordinate":
                return self._coordinate(value)
            case "element_id" | "end_element_id" | "tab":
                digits = isinstance(value, str) and re.fullmatch("[0-9]{1,6}", value)
                number = self._integer(int(value) if digits and self._accepts("digit_string") else value)
                valid = number is not None and 1 <= number <= MAX_INDEX
                _require(valid, "bad_tab" if name == "tab" else "bad_element_id")
                return number
            case "direction":
                _require(value in ("up", "down") or self._accepts("other_direction"), "bad_direction")
                return "up" if value == "up" else "down"
            case "time":  # false for NaN
                _require(type(value) in (int, float) and 0 <= value <= MAX_WAIT_SECONDS, "bad_time")
            case "url":
                _require(_is_text(value, MAX_URL_CHARS) and value != "" and not _CONTROL.search(value), "bad_url")
                if _URL_WITHOUT_SCHEME.fullmatch(value.strip()) and self._accepts("url_scheme"):
                    return f"https://{value.strip().removeprefix('//')}"
            case "text" if kind == "key":
                _require(isinstance(value, str) and is_key_chord(value), "bad_key")
            case "text":
                if type(value) in (int, float) and self._accepts("number_as_text"):
                    value = str(value)
                long = kind == "answer" and isinstance(value, str) and len(value) > MAX_TEXT_CHARS
                limit = MAX_LONG_ANSWER_CHARS if long and self._accepts("long_answer") else MAX_TEXT_CHARS
                _require(_is_text(value, limit), "bad_text")
        return value

    def _coordinate(self, value: Any) -> tuple[int, int]:
        _require(isinstance(value, list) and len(value) in (2, 4), "bad_coordinate")
        numbers = [
            round(number) if type(number) is float and not number.is_integer() and self._accepts("fraction")
            else self._integer(number)
            for number in value
        ]  # fmt: skip
        whole = [number for number in numbers if number is not None]
        _require(len(whole) == len(value), "bad_coordinate")
        if len(whole) == 4:
            _require(self._accepts("box"), "bad_coordinate")
            whole = [(whole[0] + whole[2]) // 2, (whole[1] + whole[3]) // 2]
        x, y = (min(max(number, 0), COORDINATE_RANGE) for number in whole)
        _require([x, y] == whole or self._accepts("out_of_range"), "bad_coordinate")
        return x, y

    def _integer(self, value: Any) -> int | None:
        # type() instead of isinstance: in Python true and false are integers.
        if type(value) is float and value.is_integer() and self._accepts("integral_float"):
            return int(value)
        return value if type(value) is int else None


def _is_text(value: Any, limit: int) -> bool:
    """Whether a value is text without lone surrogates, which JSON can express but no encoding can."""
    return isinstance(value, str) and len(value) <= limit and not re.search("[\ud800-\udfff]", value)
