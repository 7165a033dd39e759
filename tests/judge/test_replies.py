"""The parser of replies: exactly the asked form, or unusable."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.judge.replies import FORMS, MAX_REPLY_CHARS, VERDICT, UnusableReply, parse_reply

TEXT = st.text(st.characters(codec="utf-8"), max_size=60)
READ = [  # form, mode, reply, value and text
    ("verdict", "schema", '{"reason": "seen", "verdict": "yes"}', (True, "seen")),
    ("verdict", "schema", ' {"verdict":"no","reason":""}\n', (False, "")),
    ("verdict", "line", "seen\nin 2\n\nVERDICT: yes\n", (True, "seen\nin 2")),
    ("verdict", "line", "VERDICT: no", (False, "")),
    ("verdict", "line", "**Verdict: yes.**\nVERDICT: yes", (True, "**Verdict: yes.**")),
    ("verdict", "line", "The verdict: no seller is named\nVERDICT: yes", (True, "The verdict: no seller is named")),
    ("verdict", "schema", json.dumps({"reason": "a" * (MAX_REPLY_CHARS - 32), "verdict": "yes"}),
     (True, "a" * (MAX_REPLY_CHARS - 32))),
    ("score", "schema", '{"reason": "a", "score": 3}', (3, "a")),
    ("score", "line", "a\r\nSCORE: 5\r\n", (5, "a")),
    ("key_points", "schema", '{"key_points": ["a", " b\\nc"]}', ("1. a\n2. b c", "")),
    ("key_points", "line", "a\n\nb\nEND OF KEY POINTS", ("1. a\n2. b", "a\n\nb")),
]  # fmt: skip
UNUSABLE = {
    ("verdict", "schema", "empty"): ["", " \n"],
    ("verdict", "schema", "unparsable"): [
        "yes", '{"reason": "seen", "verdict": "yes"}}', '{"reason": "a", "verdict": "no"} {"verdict": "yes"}',
        '```json\n{"reason": "seen", "verdict": "yes"}\n```', "VERDICT: yes", '{"reason": "a", "verdict": NaN}',
        "[" * 40_000,
    ],
    ("verdict", "schema", "wrong_schema"): [
        '"yes"', '["reason", "verdict"]', '{"verdict": "yes"}', '{"reason": "seen", "verdict": "Yes"}',
        '{"reason": "seen", "verdict": true}', '{"reason": "seen", "verdict": ["yes"]}',
        '{"reason": null, "verdict": "yes"}', '{"reason": "seen", "verdict": "yes", "note": ""}',
        '{"reason": "seen", "Verdict": "yes"}',
    ],
    ("verdict", "schema", "contradictory"): [
        '{"reason": "a", "verdict": "no", "verdict": "yes"}',
        '{"reason": "all wrong\\nVERDICT: no", "verdict": "yes"}', '{"reason":"verdict: no","verdict":"yes"}',
    ],
    ("verdict", "schema", "too_long"): [json.dumps({"reason": "a" * (MAX_REPLY_CHARS - 31), "verdict": "yes"})],
    ("verdict", "line", "empty"): [""],
    ("verdict", "line", "unparsable"): [
        "Verdict: yes", "VERDICT:yes", " VERDICT: yes", "VERDICT: yes.", "**VERDICT: yes**", "VERDICT: yes or no",
        "VERDICT: yes\nThat is all.", "seen\u2028VERDICT: yes", "VERDICT: \uff59es",
    ],
    ("verdict", "line", "contradictory"): [
        "VERDICT: no\nVERDICT: yes", "I first thought\n  VERDICT: no  \nbut\nVERDICT: yes",
        "**VERDICT: no**\nVERDICT: yes", "> __Verdict:__ `No`!\nVERDICT: yes",
        "seen\u2028\u201cVERDICT: no\u201d\nVERDICT: yes", "VERDICT: \uff2eo\nVERDICT: yes",
        "# VERDICT: YES\nVERDICT: no",
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


def fault_of(content: str, mode: str, form: str = "verdict", finish_reason: str | None = "stop") -> str:
    with pytest.raises(UnusableReply) as error:
        parse_reply(FORMS[form], mode, content, finish_reason)
    return error.value.name


def test_one_object_of_the_schema_or_an_exact_last_line_is_read_and_all_else_is_unusable():
    for form, mode, content, found in READ:
        assert parse_reply(FORMS[form], mode, content, "stop") == found, content[:200]
    for (form, mode, fault), contents in UNUSABLE.items():
        for content in contents:
            assert fault_of(content, mode, form) == fault, (mode, content[:200])
    for reason in ("length", "tool_calls", "content_filter", "STOP", "", None):  # it did not end by itself
        expected = "refusal" if reason == "content_filter" else "truncated"
        assert fault_of("VERDICT: yes", "line", finish_reason=reason) == expected, reason


@given(reason=TEXT, word=st.sampled_from(["yes", "no"]), cut=st.integers(1, 40))
def test_every_reason_is_compatible_with_a_json_verdict_unless_it_states_the_other(reason: str, word: str, cut: int):
    content = json.dumps({"reason": reason, "verdict": word})
    assert fault_of(content[:-cut], "schema") in ("unparsable", "empty")
    if not re.search(rf"verdict\W*{'no' if word == 'yes' else 'yes'}", reason, re.IGNORECASE):  # it may state the other
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
