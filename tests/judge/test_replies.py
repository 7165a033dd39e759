"""The parser of replies: exactly the asked form, or unusable."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.judge.replies import FORMS, KEY_POINTS, MAX_REPLY_CHARS, SCORE, VERDICT, UnusableReply, parse_reply

TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


def fault_of(content: str, mode: str, form: str = "verdict", finish_reason: str | None = "stop") -> str:
    with pytest.raises(UnusableReply) as error:
        parse_reply(FORMS[form], mode, content, finish_reason)
    return error.value.name


def test_replies_of_the_asked_form_are_read():
    assert parse_reply(VERDICT, "schema", '{"reason": "seen", "verdict": "yes"}', "stop") == (True, "seen")
    assert parse_reply(VERDICT, "schema", ' {"verdict":"no","reason":""}\n', "stop") == (False, "")
    assert parse_reply(VERDICT, "line", "seen\nin 2\n\nVERDICT: yes\n", "stop") == (True, "seen\nin 2")
    assert parse_reply(VERDICT, "line", "VERDICT: no", "stop") == (False, "")
    assert parse_reply(SCORE, "schema", '{"reason": "a", "score": 3}', "stop") == (3, "a")
    assert parse_reply(SCORE, "line", "a\r\nSCORE: 5\r\n", "stop") == (5, "a")
    assert parse_reply(KEY_POINTS, "schema", '{"key_points": ["a", " b\\nc"]}', "stop") == ("1. a\n2. b c", "")
    assert parse_reply(KEY_POINTS, "line", "a\n\nb\nEND OF KEY POINTS", "stop") == ("1. a\n2. b", "a\n\nb")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("yes", "unparsable"),
        ("success", "unparsable"),
        ('{"reason": "seen", "verdict": "yes"', "unparsable"),
        ('{"reason": "seen", "verdict": "yes"}}', "unparsable"),
        ('{"reason": "a", "verdict": "no"} {"reason": "a", "verdict": "yes"}', "unparsable"),
        ('```json\n{"reason": "seen", "verdict": "yes"}\n```', "unparsable"),
        ('Sure: {"reason": "seen", "verdict": "yes"}', "unparsable"),
        ("VERDICT: yes", "unparsable"),
        ('{"reason": "a", "verdict": NaN}', "unparsable"),
        ("[" * 40_000, "unparsable"),
        ('"yes"', "wrong_schema"),
        ("true", "wrong_schema"),
        ("null", "wrong_schema"),
        ('["reason", "verdict"]', "wrong_schema"),
        ("{}", "wrong_schema"),
        ('{"verdict": "yes"}', "wrong_schema"),
        ('{"reason": "seen"}', "wrong_schema"),
        ('{"reason": "seen", "verdict": "Yes"}', "wrong_schema"),
        ('{"reason": "seen", "verdict": "yes "}', "wrong_schema"),
        ('{"reason": "seen", "verdict": true}', "wrong_schema"),
        ('{"reason": "seen", "verdict": ["yes"]}', "wrong_schema"),
        ('{"reason": null, "verdict": "yes"}', "wrong_schema"),
        ('{"reason": "seen", "verdict": "success"}', "wrong_schema"),
        ('{"reason": "seen", "verdict": "yes", "note": ""}', "wrong_schema"),
        ('{"reason": "seen", "Verdict": "yes"}', "wrong_schema"),
        ('{"reason": "a", "verdict": "no", "verdict": "yes"}', "contradictory"),
        ('{"reason": "all wrong\\nVERDICT: no", "verdict": "yes"}', "contradictory"),
        ('{"reason":"verdict: no","verdict":"yes"}', "contradictory"),
        (f'{{"reason": "{"a" * MAX_REPLY_CHARS}", "verdict": "yes"}}', "too_long"),
    ],
    ids=range(31),
)
def test_anything_but_one_object_of_the_schema_is_unusable(content: str, fault: str):
    assert fault_of(content, "schema") == fault


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "empty"),
        ("yes", "unparsable"),
        ("Verdict: yes", "unparsable"),
        ("VERDICT: Yes", "unparsable"),
        ("VERDICT:yes", "unparsable"),
        ("VERDICT:  yes", "unparsable"),
        (" VERDICT: yes", "unparsable"),
        ("VERDICT: yes.", "unparsable"),
        ("**VERDICT: yes**", "unparsable"),
        ("VERDICT: yes or no", "unparsable"),
        ("VERDICT: yes|no", "unparsable"),
        ("VERDICT: yes\nThat is all.", "unparsable"),
        ("The verdict line is VERDICT: yes", "unparsable"),
        ("seen\u2028VERDICT: yes", "unparsable"),
        ("VERDICT: \uff59es", "unparsable"),
        ('{"reason": "seen", "verdict": "yes"}', "unparsable"),
        ("VERDICT: no\nVERDICT: yes", "contradictory"),
        ("VERDICT: yes\nor rather\nVERDICT: no", "contradictory"),
        ("I first thought\n  VERDICT: no  \nbut\nVERDICT: yes", "contradictory"),
        ("**VERDICT: no**\nVERDICT: yes", "contradictory"),
        ("Verdict: no\nVERDICT: yes", "contradictory"),
        ("VERDICT: no.\nVERDICT: yes", "contradictory"),
        ("> __Verdict:__ `No`!\nVERDICT: yes", "contradictory"),
        ("seen\u2028\u201cVERDICT: no\u201d\nVERDICT: yes", "contradictory"),
        ("verdict:no\nVERDICT: yes", "contradictory"),
        ("# VERDICT: YES\nVERDICT: no", "contradictory"),
    ],
)
def test_anything_but_an_exact_last_line_is_unusable(content: str, fault: str):
    assert fault_of(content, "line") == fault


def test_a_line_of_another_spelling_is_never_the_decision_and_may_agree_with_it():
    assert parse_reply(VERDICT, "line", "**Verdict: yes.**\nVERDICT: yes", "stop") == (True, "**Verdict: yes.**")
    assert parse_reply(VERDICT, "line", "The verdict: no seller is named\nVERDICT: yes", "stop")[0] is True
    assert fault_of("Score: 2\nSCORE: 4", "line", "score") == "contradictory"


@pytest.mark.parametrize("reason", ["length", "tool_calls", "content_filter", "STOP", "", None])
def test_a_reply_that_did_not_end_by_itself_decides_nothing(reason: str | None):
    expected = "refusal" if reason == "content_filter" else "truncated"
    assert fault_of('{"reason": "seen", "verdict": "yes"}', "schema", finish_reason=reason) == expected
    assert fault_of("VERDICT: yes", "line", finish_reason=reason) == expected


@pytest.mark.parametrize(
    ("content", "mode", "form"),
    [
        ('{"reason": "a", "score": 6}', "schema", "score"),
        ('{"reason": "a", "score": 0}', "schema", "score"),
        ('{"reason": "a", "score": 4.0}', "schema", "score"),
        ('{"reason": "a", "score": "4"}', "schema", "score"),
        ('{"reason": "a", "score": true}', "schema", "score"),
        ('{"key_points": []}', "schema", "key_points"),
        ('{"key_points": ["a", 1]}', "schema", "key_points"),
        ('{"key_points": ["a", " "]}', "schema", "key_points"),
        (json.dumps({"key_points": ["a"] * 21}), "schema", "key_points"),
        ("END OF KEY POINTS", "line", "key_points"),
    ],
)
def test_values_outside_of_the_form_are_of_the_wrong_schema(content: str, mode: str, form: str):
    assert fault_of(content, mode, form) == "wrong_schema"


@given(reason=TEXT, word=st.sampled_from(["yes", "no"]))
def test_every_reason_is_compatible_with_a_json_verdict_unless_it_states_the_other(reason: str, word: str):
    content = json.dumps({"reason": reason, "verdict": word})
    if re.search(rf"verdict\W*{'no' if word == 'yes' else 'yes'}", reason, re.IGNORECASE):
        return  # it may state the other one
    assert parse_reply(VERDICT, "schema", content, "stop") == (word == "yes", reason)


@given(content=TEXT | st.lists(st.sampled_from(
    ["VERDICT: yes", "VERDICT: no", "yes", "\n", "\r", " ", "VERDICT:", '{"verdict": "yes"}', "\u2028", "success"]
)).map("".join))  # fmt: skip
def test_no_text_is_a_yes_in_line_mode_without_its_exact_last_line(content: str):
    try:
        value, _ = parse_reply(VERDICT, "line", content, "stop")
    except UnusableReply:
        return
    lines = content.rstrip().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert lines[-1] == f"VERDICT: {'yes' if value else 'no'}"
    assert f"VERDICT: {'no' if value else 'yes'}" not in lines


@given(text=TEXT, cut=st.integers(1, 40))
def test_no_part_of_a_json_reply_is_a_verdict(text: str, cut: int):
    whole = json.dumps({"reason": text, "verdict": "yes"})
    assert fault_of(whole[:-cut], "schema") in ("unparsable", "empty")
