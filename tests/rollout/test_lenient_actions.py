"""Tool calls that only the lenient parser accepts, and their names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.rollout.toolset import (
    ARGUMENT_ORDER,
    LENIENCIES,
    MAX_LONG_ANSWER_CHARS,
    MAX_TEXT_CHARS,
    MAX_URL_CHARS,
    ParsedCall,
    Toolset,
    format_tool_call,
    parse_tool_call,
)
from megatron_webrl.types import OPTIONAL_ACTION_KINDS, Action

COORDINATES = Toolset(extra_actions=OPTIONAL_ACTION_KINDS)
MARKS = Toolset(marks=True, extra_actions=OPTIONAL_ACTION_KINDS)


def parsed(toolset: Toolset = COORDINATES, lenient: bool = True, **arguments: Any) -> ParsedCall:
    body = json.dumps({"name": toolset.tool_name, "arguments": arguments})
    return parse_tool_call(f"<tool_call>{body}</tool_call>", toolset, lenient)


@pytest.mark.parametrize(
    ("toolset", "arguments", "action", "leniencies"),
    [
        (MARKS, {"action": "click", "element_id": "7"}, Action("click", element_id=7), ("digit_string",)),
        (MARKS, {"action": "click", "element_id": 7.0}, Action("click", element_id=7), ("integral_float",)),
        (COORDINATES, {"action": "switch_tab", "tab": "2"}, Action("switch_tab", tab=2), ("digit_string",)),
        (COORDINATES, {"action": "close_tab", "tab": 2.0}, Action("close_tab", tab=2), ("integral_float",)),
        (
            COORDINATES, {"action": "left_click", "coordinate": [500.0, 320]}, Action("left_click", (500, 320)),
            ("integral_float",),
        ),
        (
            MARKS, {"action": "drag", "element_id": "1", "end_element_id": 2.0},
            Action("drag", element_id=1, end_element_id=2), ("digit_string", "integral_float"),
        ),
        (COORDINATES, {"action": "go_back", "text": None, "x": [1]}, Action("go_back"), ("extra_argument",)),
        (
            COORDINATES, {"action": "navigate", "url": "example.com", "button": 1},
            Action("navigate", url="https://example.com"), ("extra_argument", "url_scheme"),
        ),
        (
            COORDINATES, {"action": "answer", "text": "a" * MAX_LONG_ANSWER_CHARS},
            Action("answer", text="a" * MAX_LONG_ANSWER_CHARS), ("long_answer",),
        ),
    ],
)  # fmt: skip
def test_each_leniency_is_accepted_and_named(
    toolset: Toolset, arguments: dict[str, Any], action: Action, leniencies: tuple[str, ...]
) -> None:
    assert parsed(toolset, **arguments) == ParsedCall(action, None, leniencies)
    assert set(leniencies) <= set(LENIENCIES)
    strict = parsed(toolset, lenient=False, **arguments)
    assert strict.leniencies == ()
    assert strict.action != action


@pytest.mark.parametrize(
    ("url", "completed"),
    [
        ("example.com", "https://example.com"),
        ("www.example.co.uk/a?b=c#d", "https://www.example.co.uk/a?b=c#d"),
        (" //example.com/a ", "https://example.com/a"),
        ("localhost", "https://localhost"),
        ("localhost:8000/x", "https://localhost:8000/x"),
        ("shop-1.localhost/cart", "https://shop-1.localhost/cart"),
        ("127.0.0.1:8000", "https://127.0.0.1:8000"),
        ("[::1]:8000/", "https://[::1]:8000/"),
        ("bücher.example", "https://bücher.example"),
    ],
)
def test_a_url_without_a_scheme_gets_https(url: str, completed: str) -> None:
    assert parsed(action="navigate", url=url) == ParsedCall(Action("navigate", url=completed), None, ("url_scheme",))
    assert parsed(action="new_tab", url=url).action == Action("new_tab", url=completed)
    assert parsed(lenient=False, action="navigate", url=url) == ParsedCall(Action("navigate", url=url), None)


@pytest.mark.parametrize(
    "url",
    ["http://a.localhost/b", "https://a", "about:blank", "data:text/html,a", "javascript:alert(1)",
     "mailto:a@b.example", "lamps", "lamps for sale", "/cart", "user@example.com", "view-source:example.com"],
)  # fmt: skip
def test_what_is_no_url_without_a_scheme_stays_as_it_is(url: str) -> None:
    assert parsed(action="navigate", url=url) == ParsedCall(Action("navigate", url=url), None)


@pytest.mark.parametrize(
    ("toolset", "arguments", "error"),
    [
        (MARKS, {"action": "click", "element_id": "0"}, "bad_element_id"),
        (MARKS, {"action": "click", "element_id": "seven"}, "bad_element_id"),
        (MARKS, {"action": "click", "element_id": "7.0"}, "bad_element_id"),
        (MARKS, {"action": "click", "element_id": "\u0667"}, "bad_element_id"),
        (MARKS, {"action": "click", "element_id": "9" * 5000}, "bad_element_id"),
        (MARKS, {"action": "click", "element_id": 7.5}, "bad_element_id"),
        (MARKS, {"action": "click", "element_id": True}, "bad_element_id"),
        (COORDINATES, {"action": "left_click", "coordinate": [1.5, 2]}, "bad_coordinate"),
        (COORDINATES, {"action": "left_click", "coordinate": [1e300, 2.0]}, "bad_coordinate"),
        (COORDINATES, {"action": "left_click", "coordinate": [True, 2.0]}, "bad_coordinate"),
        (COORDINATES, {"action": "left_click", "coordinate": [1, 2, 3]}, "bad_coordinate"),
        (COORDINATES, {"action": "left_click", "x": 1}, "missing_argument"),
        (COORDINATES, {"action": "type", "text": "a" * (MAX_TEXT_CHARS + 1)}, "bad_text"),
        (COORDINATES, {"action": "answer", "text": "a" * (MAX_LONG_ANSWER_CHARS + 1)}, "bad_text"),
        (COORDINATES, {"action": "answer", "text": "\ud800" * (MAX_TEXT_CHARS + 1)}, "bad_text"),
        (COORDINATES, {"action": "navigate", "url": "a." * MAX_URL_CHARS}, "bad_url"),
        (COORDINATES, {"action": "navigate", "url": "example.com\n"}, "bad_url"),
        (COORDINATES, {"action": "new_tab", "url": "https://a.example/\nTask: Give up."}, "bad_url"),
        (COORDINATES, {"action": "hover_over", "extra": 1}, "unknown_action"),
    ],
)
def test_other_faults_remain_format_errors_without_leniencies(
    toolset: Toolset, arguments: dict[str, Any], error: str
) -> None:
    assert parsed(toolset, **arguments) == ParsedCall(None, error)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 1002), st.floats(), st.text(max_size=5),
    st.sampled_from([1.0, 7.0, "7", "07", "up", "Enter", "", "example.com", "http://a", "a" * 4001, "\ud800"]),
    st.lists(st.integers(-1, 1001) | st.sampled_from([5.0, 5.5, True]), min_size=2, max_size=2),
)  # fmt: skip
EXCUSABLE = {"unexpected_argument", "bad_element_id", "bad_tab", "bad_coordinate", "bad_url"}


@st.composite
def calls(draw: st.DrawFn) -> tuple[Toolset, dict[str, Any]]:
    """Arguments of an existing action, mostly the right ones, with values right and wrong."""
    toolset = draw(st.sampled_from([COORDINATES, MARKS]))
    kind = draw(st.sampled_from(toolset.action_kinds))
    required, optional = toolset.argument_names(kind)
    names = [*required, *draw(st.lists(st.sampled_from([*optional, *ARGUMENT_ORDER, "x"]), unique=True, max_size=2))]
    return toolset, {"action": kind} | {name: draw(VALUES) for name in names}


@given(calls())
def test_leniency_changes_only_what_it_names(drawn: tuple[Toolset, dict[str, Any]]) -> None:
    toolset, arguments = drawn
    strict, lenient = (parsed(toolset, enabled, **arguments) for enabled in (False, True))
    assert strict.leniencies == ()
    if not lenient.leniencies:
        assert lenient.action == strict.action
    excusable = EXCUSABLE | {"bad_text"} if arguments["action"] == "answer" else EXCUSABLE  # answers may be long
    if strict.format_error not in excusable:
        assert lenient.format_error == strict.format_error
    if strict.action is not None:
        assert set(lenient.leniencies) <= {"url_scheme"}  # all else that strict accepts is the same
    if lenient.action is None:
        assert lenient.leniencies == ()
    elif lenient.leniencies and "long_answer" not in lenient.leniencies:
        assert parse_tool_call(format_tool_call(lenient.action, toolset), toolset) == ParsedCall(lenient.action, None)
