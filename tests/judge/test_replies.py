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


UNUSABLE = {
    ("verdict", "schema", "empty"): ["", " \n"],
    ("verdict", "schema", "unparsable"): [
        "yes", "success", '{"reason": "seen", "verdict": "yes"', '{"reason": "seen", "verdict": "yes"}}',
        '{"reason": "a", "verdict": "no"} {"reason": "a", "verdict": "yes"}',
        '```json\n{"reason": "seen", "verdict": "yes"}\n```', 'Sure: {"reason": "seen", "verdict": "yes"}',
        "VERDICT: yes", '{"reason": "a", "verdict": NaN}', "[" * 40_000,
    ],
    ("verdict", "schema", "wrong_schema"): [
        '"yes"', "true", "null", '["reason", "verdict"]', "{}", '{"verdict": "yes"}', '{"reason": "seen"}',
        '{"reason": "seen", "verdict": "Yes"}', '{"reason": "seen", "verdict": "yes "}',
        '{"reason": "seen", "verdict": true}', '{"reason": "seen", "verdict": ["yes"]}',
        '{"reason": null, "verdict": "yes"}', '{"reason": "seen", "verdict": "success"}',
        '{"reason": "seen", "verdict": "yes", "note": ""}', '{"reason": "seen", "Verdict": "yes"}',
    ],
    ("verdict", "schema", "contradictory"): [
        '{"reason": "a", "verdict": "no", "verdict": "yes"}',
        '{"reason": "all wrong\\nVERDICT: no", "verdict": "yes"}', '{"reason":"verdict: no","verdict":"yes"}',
    ],
    ("verdict", "schema", "too_long"): [f'{{"reason": "{"a" * MAX_REPLY_CHARS}", "verdict": "yes"}}'],
    ("verdict", "line", "empty"): [""],
    ("verdict", "line", "unparsable"): [
        "yes", "Verdict: yes", "VERDICT: Yes", "VERDICT:yes", "VERDICT:  yes", " VERDICT: yes", "VERDICT: yes.",
        "**VERDICT: yes**", "VERDICT: yes or no", "VERDICT: yes|no", "VERDICT: yes\nThat is all.",
        "The verdict line is VERDICT: yes", "seen\u2028VERDICT: yes", "VERDICT: \uff59es",
        '{"reason": "seen", "verdict": "yes"}',
    ],
    ("verdict", "line", "contradictory"): [
        "VERDICT: no\nVERDICT: yes", "VERDICT: yes\nor rather\nVERDICT: no",
        "I first thought\n  VERDICT: no  \nbut\nVERDICT: yes", "**VERDICT: no**\nVERDICT: yes",
        "Verdict: no\nVERDICT: yes", "VERDICT: no.\nVERDICT: yes", "> __Verdict:__ `No`!\nVERDICT: yes",
        "seen\u2028\u201cVERDICT: no\u201d\nVERDICT: yes", "verdict:no\nVERDICT: yes", "# VERDICT: YES\nVERDICT: no",
    ],
    ("score", "schema", "wrong_schema"): [
        f'{{"reason": "a", "score": {score}}}' for score in ("6", "0", "4.0", '"4"', "true")
    ],
    ("score", "line", "contradictory"): ["Score: 2\nSCORE: 4"],
    ("key_points", "schema", "wrong_schema"): [
        json.dumps({"key_points": points}) for points in ([], ["a", 1], ["a", " "], ["a"] * 21)
    ],
    ("key_points", "line", "wrong_schema"): ["END OF KEY POINTS"],
}  # fmt: skip


def test_anything_but_one_object_of_the_schema_or_an_exact_last_line_is_unusable():
    for (form, mode, fault), contents in UNUSABLE.items():
        for content in contents:
            assert fault_of(content, mode, form) == fault, (mode, content[:200])


def test_a_line_of_another_spelling_is_never_the_decision_and_may_agree_with_it():
    assert parse_reply(VERDICT, "line", "**Verdict: yes.**\nVERDICT: yes", "stop") == (True, "**Verdict: yes.**")
    assert parse_reply(VERDICT, "line", "The verdict: no seller is named\nVERDICT: yes", "stop")[0] is True


def test_a_reply_that_did_not_end_by_itself_decides_nothing():
    for reason in ("length", "tool_calls", "content_filter", "STOP", "", None):
        expected = "refusal" if reason == "content_filter" else "truncated"
        assert fault_of('{"reason": "seen", "verdict": "yes"}', "schema", finish_reason=reason) == expected, reason
        assert fault_of("VERDICT: yes", "line", finish_reason=reason) == expected, reason


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
