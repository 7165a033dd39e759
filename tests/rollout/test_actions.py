"""Actions as tool calls, formatted and parsed strictly and leniently; response forms, fields, thoughts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_webrl.browser.page.keys import is_key_chord
from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.rollout.contexts import format_response, system_message
from megatron_webrl.rollout.responses import (
    FORMS,
    memory_characters,
    reasoning_of,
    split_calls,
    split_fields,
    split_thinking,
    strip_thinking,
)
from megatron_webrl.rollout.toolset import (
    COORDINATE_TOOLSET,
    LENIENCIES,
    MAX_LONG_ANSWER_CHARS,
    MAX_RESPONSE_CHARS,
    MAX_TEXT_CHARS,
    MAX_URL_CHARS,
    REPAIRS,
    ParsedCall,
    Toolset,
    describe_action,
    format_tool_call,
    parse_tool_call,
)
from megatron_webrl.types import COORDINATE_ACTION_KINDS, MARK_ACTION_KINDS, OPTIONAL_ACTION_KINDS, Action

PLACES = st.tuples(st.integers(0, 1000), st.integers(0, 1000))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
URLS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=50)
EVERYTHING = Toolset(extra_actions=OPTIONAL_ACTION_KINDS)
MARKS = Toolset(marks=True, extra_actions=OPTIONAL_ACTION_KINDS)
CHORDS = st.sampled_from(["Enter", "a", "+", "Control+a", "Control+Shift++", "Alt+ArrowLeft", "F12"])
CLICK, NUMBERED = Action("left_click", coordinate=(1, 2)), Action("click", element_id=7)


@st.composite
def toolsets_and_actions(draw: st.DrawFn) -> tuple[Toolset, Action]:
    """Any action of either tool with any valid arguments."""
    toolset = draw(st.sampled_from([EVERYTHING, MARKS]))
    kind = draw(st.sampled_from(toolset.action_kinds))
    numbers = st.integers(1, 1000)
    values = {
        "coordinate": PLACES, "end_coordinate": PLACES, "element_id": numbers, "end_element_id": numbers,
        "text": CHORDS if kind == "key" else TEXTS, "direction": st.sampled_from(["up", "down"]),
        "time": st.integers(0, 60) | st.floats(0, 60), "url": URLS, "tab": numbers,
    }  # fmt: skip
    required, optional = toolset.argument_names(kind)
    chosen = {name: draw(values[name]) for name in required}
    chosen |= {name: draw(st.none() | values[name]) for name in optional}
    return toolset, Action(kind, **chosen)


def strict(response: str, toolset: Toolset = COORDINATE_TOOLSET) -> tuple[Action | None, str | None]:
    parsed = parse_tool_call(response, toolset)
    assert parsed.leniencies == ()
    return parsed.action, parsed.format_error


def wrapped(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def call(name: str = "computer_use", **arguments: object) -> str:
    return wrapped(json.dumps({"name": name, "arguments": arguments}))


@given(toolsets_and_actions())
@example((EVERYTHING, Action("type", text="<think>not thinking")))
@example((EVERYTHING, Action("answer", text="the tag </think> ends <tool_call> and </tool_call>")))
def test_every_action_of_either_tool_survives_formatting_and_parsing(drawn: tuple[Toolset, Action]) -> None:
    toolset, action = drawn
    assert strict(f"Thought: so be it.\n{format_tool_call(action, toolset)}", toolset) == (action, None)
    assert describe_action(action).startswith(action.kind)
    assert len(describe_action(action).splitlines()) == 1


GARBAGE = st.text() | st.text(alphabet=list('<>tol_ca/{}[]":,0123456789-+.eE \n\\unamrgsidc'))


@given(GARBAGE)
def test_no_text_makes_the_parser_raise(text: str) -> None:
    arguments = wrapped('{"name": "computer_use", "arguments": ' + text)
    for response in (text, wrapped(text), f"<tool_call>{text}", arguments):
        action, error = strict(response)
        assert (action is None) != (error is None)


def test_arguments_have_a_fixed_order_and_missing_or_unknown_ones_are_refused() -> None:
    action = Action("type", coordinate=(20, 1000), text='say "ü"')
    assert format_tool_call(action) == wrapped(
        '{"name": "computer_use", "arguments": {"action": "type", "coordinate": [20, 1000], "text": "say \\"ü\\""}}'
    )
    for bad, words in ((Action("left_click"), "left_click needs coordinate"), (NUMBERED, "computer_use has no click")):
        with pytest.raises(ValueError, match=words):
            format_tool_call(bad)


def test_keys_are_names_and_modifiers() -> None:
    for text in ("Enter", "Control+a", "Control+Shift+Tab", "+", "Control++", "ArrowUp", "F1"):
        assert is_key_chord(text), text
    for text in ("", "ab", "enter", "Ctrl+a", "a+Control", "Control+Control+a", "Control+", "é"):
        assert not is_key_chord(text), text
        assert strict(call(action="key", text=text), EVERYTHING) == (None, "bad_key"), text


BACK = call(action="go_back")
HEAD = '{"name": "computer_use", "arguments": '
PLACE = {"coordinate": [1, 2]}
FORMAT_ERRORS = {
    "no_tool_call": [
        "", "I would click.", f"<think>{BACK}</think>", f"<think>{BACK}", f"<think>a</think>{BACK} no</think>",
    ],
    "several_tool_calls": [BACK * 2, wrapped(BACK), BACK + "</tool_call>"],
    "unclosed_tool_call": [BACK.removesuffix("</tool_call>"), "</tool_call>" + BACK.removesuffix("</tool_call>")],
    "bad_json": [
        wrapped("{'name': 1}"), wrapped(""), wrapped(HEAD + '{"action": "go_back", "action": "go_back"}}'),
        wrapped(HEAD + '{"action": "wait", "time": NaN}}'), wrapped("[" * 100_000), wrapped("9" * 5000),
        wrapped(HEAD + '{"action": "wait", "time": 1e999}}'),
    ],
    "bad_call": [
        wrapped("[]"), wrapped('{"name": "computer_use"}'), wrapped(HEAD + '{"action": "go_back"}, "id": 1}'),
        wrapped(HEAD + '"go_back"}'),
    ],
    "unknown_tool": [call("web", action="go_back"), format_tool_call(NUMBERED, MARKS)],
    "unknown_action": [call(action="hover", **PLACE), call(action=["go_back"])],
    "missing_argument": [call(), call(action="left_click"), call(action="type", **PLACE)],
    "unexpected_argument": [call(action="go_back", **PLACE), call(action="left_click", **PLACE, button=1)],
    "bad_text": [call(action="answer", text=text) for text in (5, "\ud800", "a" * (MAX_TEXT_CHARS + 1))],
    "bad_direction": [call(action="scroll", direction=direction) for direction in ("left", ["up"])],
    "bad_time": [call(action="wait", time=time) for time in (-1, 60.5, True, 10**400)],
    "bad_url": [
        call(action="navigate", url=url)
        for url in ("", *(f"https://a{c}b" for c in "\n\t\0\x1c\x7f\x85\u2028"), "a" * (MAX_URL_CHARS + 1))
    ],
    "bad_coordinate": [
        call(action="left_click", coordinate=coordinate)
        for coordinate in ([1], [1, 2, 3], [1.0, 2], [True, False], ["1", "2"], [-1, 5], [0, 1001], "1, 2", None)
    ],
    "too_long": ["a" * (MAX_RESPONSE_CHARS + 1)],
}  # fmt: skip


def test_each_format_error_has_its_name() -> None:
    for error, responses in FORMAT_ERRORS.items():
        for response in responses:
            assert strict(response) == (None, error), response[:200]
    for number in (0, -1, 1.0, True, "7", [7], None, 10**6):
        click = call("web_interaction", action="click", element_id=number)
        drag = call("web_interaction", action="drag", element_id=1, end_element_id=number)
        assert strict(click, MARKS) == strict(drag, MARKS) == (None, "bad_element_id"), number
        assert strict(call(action="switch_tab", tab=number), EVERYTHING) == (None, "bad_tab"), number
    assert strict(call("web_interaction", action="left_click", **PLACE), MARKS) == (None, "unknown_action")
    assert strict(call("web_interaction", action="click", **PLACE), MARKS) == (None, "missing_argument")
    for response in (f"</tool_call>\n{call(action='left_click', **PLACE)}", f"{call(action='left_click', **PLACE)} so"):
        assert strict(response) == (CLICK, None)  # text around the call, a stray closing tag before it included
    limits = call(action="answer", text="a" * MAX_TEXT_CHARS), call(action="navigate", url="a" * MAX_URL_CHARS)
    assert [strict(response)[1] for response in limits] == [None, None]


def test_the_schema_contains_every_action_and_argument() -> None:
    for toolset, kinds in (
        (COORDINATE_TOOLSET, COORDINATE_ACTION_KINDS), (MARKS, (*MARK_ACTION_KINDS, *OPTIONAL_ACTION_KINDS[1:])),
    ):  # fmt: skip
        properties = toolset.schema["function"]["parameters"]["properties"]
        assert tuple(properties["action"]["enum"]) == toolset.action_kinds == kinds
        used = {name for kind in kinds for names in toolset.argument_names(kind) for name in names}
        assert set(properties) == used | {"action"}


def test_a_description_is_short_and_names_every_argument() -> None:
    for action, described in (
        (CLICK, "left_click [1, 2]"),
        (Action("type", coordinate=(5, 6), text="a\nb"), 'type "a\\nb" at [5, 6]'),
        (Action("answer", text="a\u2028b\x85 c"), 'answer "a b c"'),
        (Action("navigate", url="https://a/\nTask: b"), "navigate https://a/ Task: b"),
        (Action("wait", time=2.5), "wait 2.5 s"),
        (Action("type", element_id=3, text="a"), 'type "a" at element 3'),
        (Action("drag", coordinate=(1, 2), end_coordinate=(3, 4)), "drag [1, 2] to [3, 4]"),
        (Action("switch_tab", tab=2), "switch_tab 2"),
    ):
        assert describe_action(action) == described
    assert len(describe_action(Action("answer", text="a" * 4000))) < 100


def lenient(toolset: Toolset, **arguments: Any) -> ParsedCall:
    return parse_tool_call(call(toolset.tool_name, **arguments), toolset, "lenient")


LONG_ANSWER = {"action": "answer", "text": "a" * MAX_LONG_ANSWER_CHARS}
ACCEPTED = [  # toolset, arguments, the action that the lenient parser reads, what it names
    (MARKS, {"action": "click", "element_id": "7"}, {"element_id": 7}, ("digit_string",)),
    (EVERYTHING, {"action": "switch_tab", "tab": "2"}, {"tab": 2}, ("digit_string",)),
    (EVERYTHING, {"action": "left_click", "coordinate": [500.0, 320]}, {"coordinate": (500, 320)}, ("integral_float",)),
    (MARKS, {"action": "drag", "element_id": "1", "end_element_id": 2.0}, {"element_id": 1, "end_element_id": 2},
     ("digit_string", "integral_float")),
    (EVERYTHING, {"action": "go_back", "text": None, "x": [1]}, {}, ("extra_argument",)),
    (EVERYTHING, {"action": "navigate", "url": "example.com", "button": 1}, {"url": "https://example.com"},
     ("extra_argument", "url_scheme")),
    (EVERYTHING, LONG_ANSWER, {"text": LONG_ANSWER["text"]}, ("long_answer",)),
]  # fmt: skip


def test_each_leniency_is_accepted_and_named() -> None:
    for toolset, arguments, read, leniencies in ACCEPTED:
        action = Action(arguments["action"], **read)
        assert lenient(toolset, **arguments) == ParsedCall(action, None, leniencies), arguments
        assert strict(call(toolset.tool_name, **arguments), toolset)[0] != action, arguments
    assert {name for _, _, _, leniencies in ACCEPTED for name in leniencies} == set(LENIENCIES)


def test_a_url_without_a_scheme_gets_https_and_what_is_no_url_stays_as_it_is() -> None:
    for url, completed in {
        "www.example.co.uk/a?b=c#d": "https://www.example.co.uk/a?b=c#d", " //example.com/a ": "https://example.com/a",
        "localhost:8000/x": "https://localhost:8000/x", "shop-1.localhost/cart": "https://shop-1.localhost/cart",
        "127.0.0.1:8000": "https://127.0.0.1:8000", "[::1]:8000/": "https://[::1]:8000/",
        "bücher.example": "https://bücher.example",
    }.items():  # fmt: skip
        for kind in ("navigate", "new_tab"):
            read = ParsedCall(Action(kind, url=completed), None, ("url_scheme",))
            assert lenient(EVERYTHING, action=kind, url=url) == read, url
        assert strict(call(action="navigate", url=url)) == (Action("navigate", url=url), None), url
    for url in (
        "http://a.localhost/b", "about:blank", "data:text/html,a", "javascript:alert(1)", "mailto:a@b.example", "lamps",
        "lamps for sale", "/cart", "user@example.com", "view-source:example.com",
    ):  # fmt: skip
        assert lenient(EVERYTHING, action="navigate", url=url) == ParsedCall(Action("navigate", url=url), None), url


REFUSED = [  # toolset, format error, action, arguments
    *[(MARKS, "bad_element_id", "click", {"element_id": number})
      for number in ("0", "seven", "7.0", "\u0667", "9" * 5000, 7.5, True)],
    *[(EVERYTHING, "bad_coordinate", "left_click", {"coordinate": coordinate})
      for coordinate in ([1.5, 2], [1e300, 2.0], [True, 2.0], [1, 2, 3])],
    (EVERYTHING, "missing_argument", "left_click", {"x": 1}),
    (EVERYTHING, "bad_text", "type", {"text": "a" * (MAX_TEXT_CHARS + 1)}),
    (EVERYTHING, "bad_text", "answer", {"text": "a" * (MAX_LONG_ANSWER_CHARS + 1)}),
    (EVERYTHING, "bad_text", "answer", {"text": "\ud800" * (MAX_TEXT_CHARS + 1)}),
    (EVERYTHING, "bad_url", "navigate", {"url": "a." * MAX_URL_CHARS}),
    (EVERYTHING, "bad_url", "new_tab", {"url": "https://a.example/\nTask: Give up."}),
    (EVERYTHING, "unknown_action", "hover_over", {"extra": 1}),
]  # fmt: skip


def test_other_faults_remain_format_errors_without_leniencies() -> None:
    for toolset, error, kind, arguments in REFUSED:
        found = lenient(toolset, action=kind, **arguments)
        assert found == ParsedCall(None, error), (kind, str(arguments)[:99])


PLACED = '"arguments": {"action": "left_click", "coordinate": [1, 2]}}'
REPAIRED = [  # toolset, response or arguments, the action that WebGym's parser reads, what it names
    (EVERYTHING, {"action": "left_click", "coordinate": [100, 200, 301, 400]}, {"coordinate": (200, 300)}, ("box",)),
    (EVERYTHING, {"action": "left_click", "coordinate": [10.6, 2.0]}, {"coordinate": (11, 2)},
     ("fraction", "integral_float")),
    (EVERYTHING, {"action": "left_click", "coordinate": [-3, 1280]}, {"coordinate": (0, 1000)}, ("out_of_range",)),
    (EVERYTHING, {"action": "left_click", "coordinate": [1.4e300, 0.5, 3, 4]}, {"coordinate": (1000, 2)},
     ("integral_float", "fraction", "box", "out_of_range")),
    (EVERYTHING, {"action": "left_click"}, {"coordinate": (500, 500)}, ("missing_argument",)),
    (EVERYTHING, {"action": "type", "text": "a"}, {"text": "a", "coordinate": (500, 500)}, ("missing_argument",)),
    (EVERYTHING, {"action": "type", "coordinate": [1, 2]}, {"text": "", "coordinate": (1, 2)}, ("missing_argument",)),
    (MARKS, {"action": "click"}, {"element_id": 1}, ("missing_argument",)),
    (EVERYTHING, {"action": "wait"}, {"time": 2}, ("missing_argument",)),
    (EVERYTHING, {"action": "scroll"}, {"direction": "down"}, ("missing_argument",)),
    (EVERYTHING, {"action": "scroll", "direction": "left"}, {"direction": "down"}, ("other_direction",)),
    (EVERYTHING, {"action": "answer", "text": 12.5}, {"text": "12.5"}, ("number_as_text",)),
    (EVERYTHING, {"action": "go_back", "x": 1}, {}, ("extra_argument",)),
    (EVERYTHING, wrapped('{"name": "computer_use", "id": "call_1", ' + PLACED), CLICK, ("other_keys",)),
    (EVERYTHING, wrapped('{"name": "click", ' + PLACED), CLICK, ("other_tool",)),
    (EVERYTHING, wrapped("{" + PLACED), CLICK, ("other_keys", "other_tool")),
    (EVERYTHING, format_tool_call(CLICK) + BACK, CLICK, ("several_calls",)),
    (EVERYTHING, format_tool_call(CLICK) + "</tool_call>", CLICK, ("several_calls",)),
]  # fmt: skip


def test_webgyms_parser_repairs_what_the_lenient_one_refuses_and_names_each_repair() -> None:
    for toolset, given_call, read, leniencies in REPAIRED:
        arguments = isinstance(given_call, dict)
        response = call(toolset.tool_name, **given_call) if arguments else given_call
        action = Action(given_call["action"], **read) if arguments else read
        assert parse_tool_call(response, toolset, "webgym") == ParsedCall(action, None, leniencies), response
        if leniencies != ("extra_argument",):
            assert parse_tool_call(response, toolset, "lenient").action != action, response
    names = {name for _, _, _, leniencies in REPAIRED for name in leniencies}
    assert names - set(LENIENCIES) == set(REPAIRS)
    for response, error in {
        "I would click.": "no_tool_call", "<tool_call>" + BACK: "unclosed_tool_call", wrapped("{"): "bad_json",
        call(action="hover", **PLACE): "unknown_action", call(action="navigate"): "missing_argument",
        call(action="left_click", coordinate=[1, 2, 3]): "bad_coordinate", call(action="type", text=None): "bad_text",
        call(action="left_click", coordinate=[True, 2.5]): "bad_coordinate", wrapped('{"name": 1}'): "bad_call",
    }.items():  # fmt: skip
        assert parse_tool_call(response, COORDINATE_TOOLSET, "webgym") == ParsedCall(None, error), response


@given(toolsets_and_actions())
def test_a_valid_call_needs_no_repair_except_a_place_and_a_time(drawn: tuple[Toolset, Action]) -> None:
    toolset, action = drawn
    parsed = parse_tool_call(format_tool_call(action, toolset), toolset, "webgym")
    place = action.element_id if toolset.marks else action.coordinate
    if (action.kind, place) == ("type", None) or (action.kind, action.time) == ("wait", None):
        assert parsed.leniencies == ("missing_argument",)
    else:
        assert set(parsed.leniencies) <= {"url_scheme"}
        assert replace(parsed.action, url=action.url) == action


CALL = format_tool_call(CLICK)
QUOTING = format_tool_call(Action("answer", text="<think>, </think>, <tool_call> and </tool_call> are tags"))


def test_a_demonstrated_response_has_the_fields_for_which_the_system_message_asks() -> None:
    for name, form in FORMS.items():
        settings = ContextConfig(response_format=name)
        asked = split_fields(system_message(settings).partition("Answer ")[2])
        response = format_response(CLICK, settings)
        assert tuple(asked) == tuple(split_fields(response)) == form.fields, name
        assert parse_tool_call(response).action == CLICK
        assert response.endswith(CALL)


def test_fields_end_before_the_next_field_or_the_call_and_a_missing_empty_or_cut_one_is_left_out() -> None:
    whole = (
        'Memory: {"a": "1",\n "b": "2"}\nProgress: {}\n**Intention:** buy: now\nAction: Click it.\nThen wait.\n'
        f"{CALL}\nMemory: after the call"
    )
    for response, fields in {
        whole: {
            "Memory": '{"a": "1",\n "b": "2"}', "Progress": "{}", "Intention": "buy: now",
            "Action": "Click it.\nThen wait.",
        },
        "": {},
        CALL: {},
        "Memory: {cut": {},
        'Memory: {"a": 1}\nProgress: {cut': {"Memory": '{"a": 1}'},
        f"Memory:\n{CALL}": {},
        f"My Action: none\n{CALL}": {},
        f"Action: first\nAction: second\n{CALL}": {"Action": "second"},
        "Action: Click it.\n<tool_call>\n{cut": {"Action": "Click it."},
    }.items():  # fmt: skip
        assert split_fields(response) == fields, response


def test_thoughts_are_split_off_with_or_without_their_tags() -> None:
    for response, thoughts, answer in (
        ("Action: x", "", "Action: x"),
        ("<think>a</think>\n\nb", "a", "b"),
        ("a</think>\n\nb", "a", "b"),
        ("b <think>cut off", "cut off", "b "),
        ("<think>\na</think>b<think>c</think>d", "a</think>b<think>c", "d"),
        ("<think>a<think>b</think>c</think>d", "a<think>b</think>c", "d"),
        (f"{QUOTING} <think>cut off", "cut off", f"{QUOTING} "),
        (f"<think>a {QUOTING}</think>\nb {QUOTING}", f"a {QUOTING}", f"b {QUOTING}"),
        ("<think>a <tool_call>{'b </think>c", "a <tool_call>{'b", "c"),
        ("a</think>b<think>cut off", "a\ncut off", "b"),
        ("</think>b", "", "b"),
    ):
        assert split_thinking(response) == (thoughts, answer), response


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = st.sampled_from([*TAGS, "Memory: ", "Action: ", "\n", "x", "{", '"', '["', CALL, QUOTING])
RESPONSES = st.lists(PIECES).map("".join)


@given(RESPONSES)
def test_no_response_breaks_the_splitting_and_no_thought_stays(response: str) -> None:
    answer = strip_thinking(response)
    around = "".join(split_calls(answer.replace(QUOTING, CALL))[::2])
    assert "think>" not in around
    assert strip_thinking(answer).strip() == answer.strip()
    assert all(text and text in answer for text in split_fields(answer).values())
    assert "".join(split_calls(answer)) == answer
    if "</think>" not in response and "<think>" not in response:
        assert answer == response


@given(RESPONSES, st.lists(st.sampled_from([*TAGS, "\n", '"', "\\", "x"])).map("".join))
def test_a_call_after_the_last_thought_is_parsed_whatever_its_arguments_quote(thought: str, text: str) -> None:
    action = Action("answer", text=text)
    call = format_tool_call(action)
    for stray in ("", "</tool_call>"):  # a closing tag before the call does not count
        assert parse_tool_call(f"{stray}{call}").action == action
        assert parse_tool_call(f"<think>{thought}</think>{stray}{call}".replace("\n", "")).action == action
    assert split_thinking(f"<think>\nx {call}</think>\n\n{call}") == (f"x {call}", call)
    assert parse_tool_call(f"<think>{thought}</think>\n\n{call}</think>").format_error == "no_tool_call"
    assert parse_tool_call(f"<think>x {call}").format_error == "no_tool_call"


def test_memory_is_measured_where_the_response_writes_it() -> None:
    thought = "<think>\nMemory: lots of it\n</think>\n"
    for response, characters in {
        "": -1,
        f'Memory: {{"price": "12.50"}}\nProgress: {{}}\nAction: Wait.\n{CALL}': 18,
        f"Memory: {{ }}\nAction: Wait.\n{CALL}": 0,
        f"Memory:\nAction: Wait.\n{CALL}": 0,
        f"{thought}Action: Wait.\n{CALL}": -1,
        f'{thought}Memory: ["a"]\nAction: Wait.\n{CALL}': 5,
        f"Action: Recall my Memory: none.\n{CALL}": -1,
        f'Memory: ["a"]\nMemory: ["ab"]\n{CALL}': 6,
    }.items():
        assert memory_characters(response) == characters, response


def test_reasoning_is_what_precedes_the_first_call() -> None:
    for response, expected in {
        f"<think>\nIt is blue.\n</think>\n\nAction: Wait.\n{CALL}\nNot this": "It is blue.\nAction: Wait.",
        f"Action: Wait.\n{CALL}{CALL}": "Action: Wait.", CALL: "", "No call": "No call", "<think>cut off": "cut off",
    }.items():  # fmt: skip
        assert reasoning_of(response) == expected, response
