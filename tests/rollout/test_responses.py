"""Response forms, fields of a response, thoughts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.rollout.contexts import format_response, system_message
from megatron_webrl.rollout.responses import (
    FORMS,
    memory_characters,
    split_calls,
    split_fields,
    split_thinking,
    strip_thinking,
)
from megatron_webrl.rollout.toolset import format_tool_call, parse_tool_call
from megatron_webrl.types import Action

CLICK = Action("left_click", coordinate=(500, 320))
CALL = format_tool_call(CLICK)
QUOTING = format_tool_call(Action("answer", text="<think>, </think>, <tool_call> and </tool_call> are tags"))
PUBLISHED = {
    "bare": (),
    "vanilla": ("Action",),
    "progress": ("Progress", "Action"),
    "memory_additive": ("Memory", "Progress", "Intention", "Action"),
    "memory_compressive": ("Memory", "Progress", "Intention", "Action"),
    "memory_compact": ("Memory",),
}


def test_a_demonstrated_response_has_the_published_fields_for_which_the_system_message_asks() -> None:
    assert set(FORMS) == set(PUBLISHED)
    for name, fields in PUBLISHED.items():
        settings = ContextConfig(response_format=name)
        asked = split_fields(system_message(settings).partition("Answer ")[2])
        response = format_response(CLICK, settings)
        assert tuple(asked) == tuple(split_fields(response)) == FORMS[name].fields == fields, name
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
