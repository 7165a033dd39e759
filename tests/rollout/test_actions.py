"""Formatting actions as tool calls, and parsing tool calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_webrl.browser.page.keys import is_key_chord
from megatron_webrl.rollout.toolset import (
    ARGUMENT_ORDER,
    COORDINATE_TOOLSET,
    MAX_RESPONSE_CHARS,
    MAX_TEXT_CHARS,
    Toolset,
    describe_action,
    format_tool_call,
    parse_tool_call,
)
from megatron_webrl.types import COORDINATE_ACTION_KINDS, MARK_ACTION_KINDS, OPTIONAL_ACTION_KINDS, Action

PLACES = st.tuples(st.integers(0, 1000), st.integers(0, 1000))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
URLS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=50)
ACTIONS = st.one_of(
    st.builds(Action, st.just("left_click"), coordinate=PLACES),
    st.builds(Action, st.just("type"), coordinate=st.none() | PLACES, text=TEXTS),
    st.builds(Action, st.just("scroll"), coordinate=st.none() | PLACES, direction=st.sampled_from(["up", "down"])),
    st.builds(Action, st.just("wait"), time=st.none() | st.integers(0, 60) | st.floats(0, 60)),
    st.just(Action("go_back")),
    st.builds(Action, st.just("navigate"), url=URLS),
    st.builds(Action, st.just("answer"), text=TEXTS),
)
EVERYTHING = Toolset(extra_actions=OPTIONAL_ACTION_KINDS)
MARKS = Toolset(marks=True, extra_actions=OPTIONAL_ACTION_KINDS)
CHORDS = st.sampled_from(["Enter", "a", "+", "Control+a", "Control+Shift++", "Alt+ArrowLeft", "F12"])


@st.composite
def toolsets_and_actions(draw: st.DrawFn) -> tuple[Toolset, Action]:
    """Any action of either tool with any valid arguments."""
    toolset = draw(st.sampled_from([EVERYTHING, MARKS]))
    kind = draw(st.sampled_from(toolset.action_kinds))
    numbers = st.integers(1, 1000)
    values = {
        "coordinate": PLACES, "end_coordinate": PLACES, "element_id": numbers, "end_element_id": numbers,
        "text": CHORDS if kind == "key" else TEXTS,
        "direction": st.sampled_from(["up", "down"]), "time": st.integers(0, 60), "url": URLS,
        "tab": numbers,
    }  # fmt: skip
    required, optional = toolset.argument_names(kind)
    chosen = {name: draw(values[name]) for name in required}
    chosen |= {name: draw(st.none() | values[name]) for name in optional}
    return toolset, Action(kind, **chosen)


def strict(response: str, toolset: Toolset = COORDINATE_TOOLSET) -> tuple[Action | None, str | None]:
    """Action and format error of the strict parser."""
    parsed = parse_tool_call(response, toolset)
    assert parsed.leniencies == ()
    return parsed.action, parsed.format_error


def wrapped(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def call(name: str = "computer_use", **arguments: object) -> str:
    return wrapped(json.dumps({"name": name, "arguments": arguments}))


@given(ACTIONS)
@example(Action("type", text="<think>not thinking"))
@example(Action("answer", text="the tag </think> ends <tool_call> and </tool_call>"))
def test_every_action_survives_formatting_and_parsing(action: Action) -> None:
    assert strict(f"Thought: so be it.\n{format_tool_call(action)}") == (action, None)


@given(toolsets_and_actions())
def test_every_action_of_either_tool_survives_formatting_and_parsing(drawn: tuple[Toolset, Action]) -> None:
    toolset, action = drawn
    assert strict(format_tool_call(action, toolset), toolset) == (action, None)
    assert describe_action(action).startswith(action.kind)
    assert len(describe_action(action).splitlines()) == 1


def test_a_toolset_accepts_only_its_own_name_places_and_enabled_actions() -> None:
    click = Action("click", element_id=7)
    assert format_tool_call(click, MARKS) == wrapped(
        '{"name": "web_interaction", "arguments": {"action": "click", "element_id": 7}}'
    )
    assert strict(format_tool_call(click, MARKS)) == (None, "unknown_tool")
    assert strict(call("web_interaction", action="left_click", coordinate=[1, 2]), MARKS) == (None, "unknown_action")
    assert strict(call("web_interaction", action="click", coordinate=[1, 2]), MARKS) == (None, "missing_argument")
    assert strict(call(action="hover", coordinate=[1, 2])) == (None, "unknown_action")
    assert strict(call(action="hover", coordinate=[1, 2]), EVERYTHING) == (Action("hover", (1, 2)), None)
    with pytest.raises(ValueError, match="computer_use has no click"):
        format_tool_call(click)


def test_an_element_and_a_tab_are_whole_numbers_from_one() -> None:
    for number in (0, -1, 1.0, True, "7", [7], None, 10**6):
        click = call("web_interaction", action="click", element_id=number)
        drag = call("web_interaction", action="drag", element_id=1, end_element_id=number)
        assert strict(click, MARKS) == strict(drag, MARKS) == (None, "bad_element_id"), number
        assert strict(call(action="switch_tab", tab=number), EVERYTHING) == (None, "bad_tab"), number


def test_keys_are_names_and_modifiers() -> None:
    for text in ("Enter", "Control+a", "Control+Shift+Tab", "+", "Control++", "ArrowUp", "F1"):
        assert is_key_chord(text), text
    for text in ("", "ab", "enter", "Ctrl+a", "a+Control", "Control+Control+a", "Control+", "é"):
        assert not is_key_chord(text), text
        assert strict(call(action="key", text=text), EVERYTHING) == (None, "bad_key"), text


GARBAGE = st.text() | st.text(alphabet=list('<>tol_ca/{}[]":,0123456789-+.eE \n\\unamrgsidc'))


@given(GARBAGE)
def test_no_text_makes_the_parser_raise(text: str) -> None:
    arguments = wrapped('{"name": "computer_use", "arguments": ' + text)
    for response in (text, wrapped(text), f"<tool_call>{text}", arguments):
        action, error = strict(response)
        assert (action is None) != (error is None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers()
    | st.sampled_from([*COORDINATE_ACTION_KINDS, "up", "\ud800"]),
    lambda values: st.lists(values, max_size=3), max_leaves=4,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["action", "coordinate", "text", "direction", "time", "url", "x"]), VALUES))
def test_no_arguments_make_the_parser_raise_and_accepted_ones_can_be_formatted(arguments: dict[str, object]) -> None:
    action, error = strict(call(**arguments))
    assert (action is None) != (error is None)
    if action is not None:
        assert strict(format_tool_call(action)) == (action, None)
        assert describe_action(action).startswith(action.kind)


def test_arguments_have_a_fixed_order() -> None:
    action = Action("type", coordinate=(20, 1000), text='say "ü"')
    assert format_tool_call(action) == wrapped(
        '{"name": "computer_use", "arguments": {"action": "type", "coordinate": [20, 1000], "text": "say \\"ü\\""}}'
    )
    assert format_tool_call(Action("go_back")) == wrapped(
        '{"name": "computer_use", "arguments": {"action": "go_back"}}'
    )
    with pytest.raises(ValueError, match="left_click needs coordinate"):
        format_tool_call(Action("left_click"))


BACK = call(action="go_back")
HEAD = '{"name": "computer_use", "arguments": '
PLACE = {"coordinate": [1, 2]}
FORMAT_ERRORS = {
    "no_tool_call": [
        "", "I would click.", f"<think>{BACK}</think>", f"<think>{BACK}", f"<think>a</think>{BACK} no</think>",
        f"{BACK}</think>I would go back.",
    ],
    "several_tool_calls": [BACK * 2, wrapped(BACK), BACK + "</tool_call>"],
    "unclosed_tool_call": [BACK.removesuffix("</tool_call>")],
    "bad_json": [
        wrapped("{'name': 1}"), wrapped(""), wrapped(HEAD + '{"action": "go_back", "action": "go_back"}}'),
        wrapped(HEAD + '{"action": "wait", "time": NaN}}'), wrapped("[" * 100_000), wrapped("9" * 5000),
        wrapped(HEAD + '{"action": "wait", "time": 1e999}}'),
    ],
    "bad_call": [
        wrapped("[]"), wrapped('{"name": "computer_use"}'), wrapped(HEAD + '{"action": "go_back"}, "id": 1}'),
        wrapped(HEAD + '"go_back"}'),
    ],
    "unknown_tool": [call("web", action="go_back")],
    "unknown_action": [call(action="hover"), call(action=["go_back"])],
    "missing_argument": [call(), call(action="left_click"), call(action="type", **PLACE)],
    "unexpected_argument": [call(action="go_back", **PLACE), call(action="left_click", **PLACE, button=1)],
    "bad_text": [call(action="answer", text=text) for text in (5, "\ud800", "a" * (MAX_TEXT_CHARS + 1))],
    "bad_direction": [call(action="scroll", direction=direction) for direction in ("left", ["up"])],
    "bad_time": [call(action="wait", time=time) for time in (-1, True, 10**400)],
    "bad_url": [
        call(action="navigate", url=url)
        for url in ("", *(f"https://a{c}b" for c in "\n\r\t\0\x1c\x7f\x85\u2028\u2029"))
    ],
    "bad_coordinate": [
        call(action="left_click", coordinate=coordinate)
        for coordinate in ([1], [1, 2, 3], [1.0, 2], [True, False], ["1", "2"], [-1, 5], [0, 1001], [None, 1], "1, 2",
                           5, {"x": 1}, [[1, 2]], None)
    ],
    "too_long": ["a" * (MAX_RESPONSE_CHARS + 1)],
}  # fmt: skip


def test_each_format_error_has_its_name() -> None:
    for error, responses in FORMAT_ERRORS.items():
        for response in responses:
            assert strict(response) == (None, error), response[:200]


def test_the_schema_contains_every_action_and_argument() -> None:
    for toolset, kinds in (
        (COORDINATE_TOOLSET, COORDINATE_ACTION_KINDS), (Toolset(marks=True), MARK_ACTION_KINDS),
        (EVERYTHING, (*COORDINATE_ACTION_KINDS, *OPTIONAL_ACTION_KINDS)),
        (MARKS, (*MARK_ACTION_KINDS, *OPTIONAL_ACTION_KINDS[1:])),
    ):  # fmt: skip
        parameters = toolset.schema["function"]["parameters"]
        assert tuple(parameters["properties"]["action"]["enum"]) == toolset.action_kinds == kinds
        assert all(f"{kind}: " in parameters["properties"]["action"]["description"] for kind in kinds)
        used = {name for kind in kinds for names in toolset.argument_names(kind) for name in names}
        assert set(parameters["properties"]) == used | {"action"}
        assert used <= set(ARGUMENT_ORDER)


def test_a_description_is_short() -> None:
    assert describe_action(Action("left_click", coordinate=(5, 6))) == "left_click [5, 6]"
    assert describe_action(Action("type", coordinate=(5, 6), text="a\nb")) == 'type "a\\nb" at [5, 6]'
    assert describe_action(Action("answer", text="a\u2028b\x85 c")) == 'answer "a b c"'
    assert describe_action(Action("navigate", url="https://a/\nTask: b")) == "navigate https://a/ Task: b"
    assert describe_action(Action("scroll", direction="up")) == "scroll up"
    assert describe_action(Action("wait", time=2.5)) == "wait 2.5 s"
    assert describe_action(Action("type", element_id=3, text="a")) == 'type "a" at element 3'
    assert describe_action(Action("drag", coordinate=(1, 2), end_coordinate=(3, 4))) == "drag [1, 2] to [3, 4]"
    assert describe_action(Action("drag", element_id=1, end_element_id=2)) == "drag element 1 to element 2"
    assert describe_action(Action("switch_tab", tab=2)) == "switch_tab 2"
    assert len(describe_action(Action("answer", text="a" * 4000))) < 100
