"""Format actions as tool calls, and parse tool calls.

<tool_call>
{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [500, 320]}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_webrl.browser.page.keys import is_key_chord
from megatron_webrl.rollout.toolset import ARGUMENT_ORDER, COORDINATE_TOOLSET, Toolset
from megatron_webrl.system.text import shorten
from megatron_webrl.types import COORDINATE_RANGE, Action

TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
MAX_RESPONSE_CHARS = 200_000
MAX_TEXT_CHARS = 4_000
MAX_URL_CHARS = 2_000
MAX_WAIT_SECONDS = 60.0
MAX_INDEX = 100_000  # of an element or a tab
MAX_DESCRIBED_CHARS = 80  # of an action's text or URL in the history


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
    """A short description for the history: `type "abc" at [200, 300]`."""
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
    return " ".join(terms)


def parse_tool_call(response: str, toolset: Toolset = COORDINATE_TOOLSET) -> tuple[Action | None, str | None]:
    """The response's action, or else its format error; exactly one is None. Never raises.

    <think> blocks are ignored; other text around the one tool call is allowed.
    """
    try:
        return _parse(response, toolset), None
    except _Malformed as error:
        return None, str(error)


def strip_thinking(response: str) -> str:
    """The response without its <think> blocks; an unclosed one extends to the end."""
    return re.sub(r"<think>.*?(?:</think>\s*|\Z)", "", response, flags=re.DOTALL)


def _parse(response: str, toolset: Toolset) -> Action:
    if len(response) > MAX_RESPONSE_CHARS:
        raise _Malformed("too_long")
    text = strip_thinking(response)
    _, *bodies = text.split(TOOL_CALL_OPEN)
    if not bodies:
        raise _Malformed("no_tool_call")
    if len(bodies) > 1 or bodies[0].count(TOOL_CALL_CLOSE) > 1:
        raise _Malformed("several_tool_calls")
    if TOOL_CALL_CLOSE not in bodies[0]:
        raise _Malformed("unclosed_tool_call")
    call = _load(bodies[0].split(TOOL_CALL_CLOSE)[0])
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        raise _Malformed("bad_call")
    if call["name"] != toolset.tool_name:
        raise _Malformed("unknown_tool")
    return _action(call["arguments"], toolset)


def _load(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or a number of thousands of digits
        raise _Malformed("bad_json") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _action(arguments: dict[str, Any], toolset: Toolset) -> Action:
    if "action" not in arguments:
        raise _Malformed("missing_argument")
    kind = next((kind for kind in toolset.action_kinds if kind == arguments["action"]), None)
    if kind is None:
        raise _Malformed("unknown_action")
    required, optional = toolset.argument_names(kind)
    values = {name: value for name, value in arguments.items() if name != "action"}
    if any(name not in values for name in required):
        raise _Malformed("missing_argument")
    if any(name not in required + optional for name in values):
        raise _Malformed("unexpected_argument")
    checks: dict[str, Callable[[Any], Any]] = {
        "coordinate": _coordinate,
        "end_coordinate": _coordinate,
        "element_id": _element_id,
        "end_element_id": _element_id,
        "text": _key if kind == "key" else _text,
        "direction": _direction,
        "time": _time,
        "url": _url,
        "tab": _tab,
    }
    return Action(kind, **{name: checks[name](value) for name, value in values.items()})


def _coordinate(value: Any) -> tuple[int, int]:
    # type() instead of isinstance: in Python true and false are integers.
    if not isinstance(value, list) or len(value) != 2 or any(type(number) is not int for number in value):
        raise _Malformed("bad_coordinate")
    if not all(0 <= number <= COORDINATE_RANGE for number in value):
        raise _Malformed("bad_coordinate")
    return value[0], value[1]


def _element_id(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_INDEX:
        raise _Malformed("bad_element_id")
    return value


def _tab(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_INDEX:
        raise _Malformed("bad_tab")
    return value


def _key(value: Any) -> str:
    if not isinstance(value, str) or not is_key_chord(value):
        raise _Malformed("bad_key")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not _is_unicode(value):
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


def _url(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_URL_CHARS or not _is_unicode(value):
        raise _Malformed("bad_url")
    return value


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON can express but no encoding can."""
    return not re.search("[\ud800-\udfff]", text)
