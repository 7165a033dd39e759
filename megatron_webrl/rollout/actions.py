"""Actions as text, and text as actions.

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
from megatron_webrl.types import COORDINATE_RANGE, Action

TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
MAX_RESPONSE_CHARS = 200_000  # characters
MAX_TEXT_CHARS = 4_000
MAX_URL_CHARS = 2_000
MAX_WAIT_SECONDS = 60.0  # seconds
MAX_INDEX = 100_000  # of an element or a tab


class _Malformed(ValueError):
    """Carries the name of a format error."""


def format_tool_call(action: Action, toolset: Toolset = COORDINATE_TOOLSET) -> str:
    """The tool call of an action, keys in their one order.

    Raises ValueError if an argument is missing or the tool has no such action.
    """
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
    """A few words for the history: `type "abc" at [200, 300]`."""
    words: list[str] = [action.kind]
    if action.text is not None:
        words.append(json.dumps(_shortened(action.text), ensure_ascii=False))
    if action.url is not None:
        words.append(_shortened(action.url))
    if action.direction is not None:
        words.append(action.direction)
    if action.time is not None:
        words.append(f"{action.time:g} s")
    if action.tab is not None:
        words.append(str(action.tab))
    at = "at " if len(words) > 1 else ""
    if action.coordinate is not None:
        words.append(f"{at}{list(action.coordinate)}")
    if action.element_id is not None:
        words.append(f"{at}element {action.element_id}")
    if action.end_coordinate is not None:
        words.append(f"to {list(action.end_coordinate)}")
    if action.end_element_id is not None:
        words.append(f"to element {action.end_element_id}")
    return " ".join(words)


def parse_tool_call(response: str, toolset: Toolset = COORDINATE_TOOLSET) -> tuple[Action | None, str | None]:
    """The action of a response, or the name of the format error; exactly one of the two is None.

    Thinking is left out; other text around the one tool call is allowed. Never raises.
    """
    try:
        return _parse(response, toolset), None
    except _Malformed as error:
        return None, str(error)


def strip_thinking(response: str) -> str:
    """The response without its <think> blocks; one that is not closed goes to the end."""
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
    given = {name: value for name, value in arguments.items() if name != "action"}
    if any(name not in given for name in required):
        raise _Malformed("missing_argument")
    if any(name not in required + optional for name in given):
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
    return Action(kind, **{name: checks[name](value) for name, value in given.items()})


def _coordinate(value: Any) -> tuple[int, int]:
    # type() and not isinstance: true and false are integers to Python.
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
    if type(value) not in (int, float) or not 0 <= value <= MAX_WAIT_SECONDS:  # which no NaN is
        raise _Malformed("bad_time")
    return value


def _url(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_URL_CHARS or not _is_unicode(value):
        raise _Malformed("bad_url")
    return value


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON can spell but nothing can write."""
    return not re.search("[\ud800-\udfff]", text)


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
