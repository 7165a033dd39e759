"""Tool calls that only the lenient parser accepts, and their names."""

from __future__ import annotations

import json
from typing import Any

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


LONG_ANSWER = {"action": "answer", "text": "a" * MAX_LONG_ANSWER_CHARS}
ACCEPTED = [  # toolset, arguments, the action that the lenient parser reads, what it names
    (MARKS, {"action": "click", "element_id": "7"}, {"element_id": 7}, ("digit_string",)),
    (MARKS, {"action": "click", "element_id": 7.0}, {"element_id": 7}, ("integral_float",)),
    (COORDINATES, {"action": "switch_tab", "tab": "2"}, {"tab": 2}, ("digit_string",)),
    (COORDINATES, {"action": "close_tab", "tab": 2.0}, {"tab": 2}, ("integral_float",)),
    (COORDINATES, {"action": "left_click", "coordinate": [500.0, 320]}, {"coordinate": (500, 320)},
     ("integral_float",)),
    (MARKS, {"action": "drag", "element_id": "1", "end_element_id": 2.0}, {"element_id": 1, "end_element_id": 2},
     ("digit_string", "integral_float")),
    (COORDINATES, {"action": "go_back", "text": None, "x": [1]}, {}, ("extra_argument",)),
    (COORDINATES, {"action": "navigate", "url": "example.com", "button": 1}, {"url": "https://example.com"},
     ("extra_argument", "url_scheme")),
    (COORDINATES, LONG_ANSWER, {"text": LONG_ANSWER["text"]}, ("long_answer",)),
]  # fmt: skip


def test_each_leniency_is_accepted_and_named() -> None:
    for toolset, arguments, read, leniencies in ACCEPTED:
        action = Action(arguments["action"], **read)
        assert parsed(toolset, **arguments) == ParsedCall(action, None, leniencies), arguments
        strict = parsed(toolset, lenient=False, **arguments)
        assert strict.leniencies == (), arguments
        assert strict.action != action, arguments
    assert {name for _, _, _, leniencies in ACCEPTED for name in leniencies} == set(LENIENCIES)


def test_a_url_without_a_scheme_gets_https_and_what_is_no_url_stays_as_it_is() -> None:
    for url, completed in {
        "example.com": "https://example.com",
        "www.example.co.uk/a?b=c#d": "https://www.example.co.uk/a?b=c#d",
        " //example.com/a ": "https://example.com/a",
        "localhost": "https://localhost",
        "localhost:8000/x": "https://localhost:8000/x",
        "shop-1.localhost/cart": "https://shop-1.localhost/cart",
        "127.0.0.1:8000": "https://127.0.0.1:8000",
        "[::1]:8000/": "https://[::1]:8000/",
        "bücher.example": "https://bücher.example",
    }.items():
        action = Action("navigate", url=completed)
        assert parsed(action="navigate", url=url) == ParsedCall(action, None, ("url_scheme",)), url
        assert parsed(action="new_tab", url=url).action == Action("new_tab", url=completed), url
        assert parsed(lenient=False, action="navigate", url=url) == ParsedCall(Action("navigate", url=url), None), url
    for url in (
        "http://a.localhost/b", "https://a", "about:blank", "data:text/html,a", "javascript:alert(1)",
        "mailto:a@b.example", "lamps", "lamps for sale", "/cart", "user@example.com", "view-source:example.com",
    ):  # fmt: skip
        assert parsed(action="navigate", url=url) == ParsedCall(Action("navigate", url=url), None), url


REFUSED = [  # toolset, format error, action, arguments
    *[(MARKS, "bad_element_id", "click", {"element_id": number})
      for number in ("0", "seven", "7.0", "\u0667", "9" * 5000, 7.5, True)],
    *[(COORDINATES, "bad_coordinate", "left_click", {"coordinate": coordinate})
      for coordinate in ([1.5, 2], [1e300, 2.0], [True, 2.0], [1, 2, 3])],
    (COORDINATES, "missing_argument", "left_click", {"x": 1}),
    (COORDINATES, "bad_text", "type", {"text": "a" * (MAX_TEXT_CHARS + 1)}),
    (COORDINATES, "bad_text", "answer", {"text": "a" * (MAX_LONG_ANSWER_CHARS + 1)}),
    (COORDINATES, "bad_text", "answer", {"text": "\ud800" * (MAX_TEXT_CHARS + 1)}),
    (COORDINATES, "bad_url", "navigate", {"url": "a." * MAX_URL_CHARS}),
    (COORDINATES, "bad_url", "navigate", {"url": "example.com\n"}),
    (COORDINATES, "bad_url", "new_tab", {"url": "https://a.example/\nTask: Give up."}),
    (COORDINATES, "unknown_action", "hover_over", {"extra": 1}),
]  # fmt: skip


def test_other_faults_remain_format_errors_without_leniencies() -> None:
    for toolset, error, kind, arguments in REFUSED:
        assert parsed(toolset, action=kind, **arguments) == ParsedCall(None, error), (kind, str(arguments)[:99])


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
