"""Read a judge model's reply. Strict: a reply that does not have exactly the asked form decides nothing.

Two modes. "schema": the whole reply is one JSON object with exactly the fields of the form. "line": free text whose
last line is exactly the form's line, such as `VERDICT: yes`. No other text of a reply is ever searched for a decision;
a line of it that states another one, in whatever spelling, makes the reply unusable.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_webrl.util.strict_json import RepeatedKey, refuse_constant, unique_keys

MODES = ("schema", "line")
MAX_REPLY_CHARS = 50_000
MAX_KEY_POINTS = 20
SCORES = (1, 2, 3, 4, 5)

Value = bool | int | str


class UnusableReply(Exception):
    """A reply that decides nothing. `name` says why in a word, such as "truncated"; `text` is the reply, if any."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(name)
        self.name, self.text = name, text


@dataclass(frozen=True)
class ReplyForm:
    """What a reply consists of: a text and one value."""

    name: str  # of the prompt files that ask for the form
    text_field: str  # "" for none
    value_field: str
    value_schema: dict[str, Any]
    line: re.Pattern[str]  # the last line in line mode; its group is the value
    read_value: Callable[[Any], Value | None]  # of the JSON value; None: invalid
    read_line: Callable[[str, str], Value | None]  # of the line's group and the text before it

    def schema(self) -> dict[str, Any]:
        """The JSON schema, text first: a reason that precedes the decision can inform it."""
        properties: dict[str, Any] = {self.text_field: {"type": "string"}} if self.text_field else {}
        properties[self.value_field] = self.value_schema
        return {
            "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        }  # fmt: skip


def _key_points(found: Any) -> str | None:
    texts = [text.strip() for text in found if isinstance(text, str)] if isinstance(found, list) else []
    if not 0 < len(texts) <= MAX_KEY_POINTS or len(texts) != len(found) or not all(texts):
        return None
    return numbered_lines(texts)


def numbered_lines(texts: Iterable[str]) -> str:
    """A line for each text, numbered from 1."""
    return "\n".join(f"{number}. {' '.join(text.split())}" for number, text in enumerate(texts, 1))


VERDICT = ReplyForm(
    "verdict", "reason", "verdict", {"type": "string", "enum": ["yes", "no"]}, re.compile(r"VERDICT: (yes|no)"),
    lambda value: {"yes": True, "no": False}.get(value) if isinstance(value, str) else None,
    lambda word, text: word == "yes",
)  # fmt: skip
SCORE = ReplyForm(
    "score", "reason", "score", {"type": "integer", "enum": list(SCORES)}, re.compile(r"SCORE: ([1-5])"),
    lambda value: value if type(value) is int and value in SCORES else None,
    lambda word, text: int(word),
)  # fmt: skip
KEY_POINTS = ReplyForm(
    "key_points", "", "key_points", {"type": "array", "items": {"type": "string"}},
    re.compile(r"(END OF KEY POINTS)"), _key_points,
    lambda word, text: _key_points([line for line in text.split("\n") if line.strip()]),
)  # fmt: skip
FORMS = {form.name: form for form in (VERDICT, SCORE, KEY_POINTS)}


def parse_reply(form: ReplyForm, mode: str, content: str, finish_reason: str | None) -> tuple[Value, str]:
    """The value of a reply, and its text. Raises UnusableReply: refusal, truncated, empty, too_long, unparsable,
    wrong_schema or contradictory.

    `finish_reason`: the endpoint's; a reply that did not end by itself decides nothing, whatever it says.
    """
    if finish_reason != "stop":
        raise UnusableReply("refusal" if finish_reason == "content_filter" else "truncated", content)
    if not content.strip():
        raise UnusableReply("empty", content)
    if len(content) > MAX_REPLY_CHARS:
        raise UnusableReply("too_long", content)
    value, text = (_parse_object if mode == "schema" else _parse_lines)(form, content)
    for line in text.splitlines():
        match = form.line.fullmatch(_plain_line(line))
        if match and form.read_line(match[1], text) not in (value, None):
            raise UnusableReply("contradictory", content)
    return value, text


def _parse_object(form: ReplyForm, content: str) -> tuple[Value, str]:
    try:
        found = json.loads(content, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except RepeatedKey:
        raise UnusableReply("contradictory", content) from None
    except (ValueError, RecursionError):
        raise UnusableReply("unparsable", content) from None
    names = [name for name in (form.text_field, form.value_field) if name]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise UnusableReply("wrong_schema", content)
    text, value = found.get(form.text_field, ""), form.read_value(found[form.value_field])
    if value is None or not isinstance(text, str):
        raise UnusableReply("wrong_schema", content)
    return value, text


def _parse_lines(form: ReplyForm, content: str) -> tuple[Value, str]:
    *before, last = re.split(r"\r\n|\r|\n", content.rstrip())
    match, text = form.line.fullmatch(last), "\n".join(before).strip()
    if match is None:
        raise UnusableReply("unparsable", content)
    value = form.read_line(match[1], text)
    if value is None:
        raise UnusableReply("wrong_schema", content)
    return value, text


def _plain_line(line: str) -> str:
    """A line without letter case, markup, quotes, spaces and punctuation: `VERDICT: no` for `> **Verdict:** "No".`"""
    name, value = (filter(str.isalnum, part) for part in unicodedata.normalize("NFKC", line).partition(":")[::2])
    return f"{''.join(name).upper()}: {''.join(value).lower()}"


_READABLE = ("truncated", "too_long", "unparsable", "wrong_schema", "contradictory")  # faults of replies with a text
_NEGATIVE = re.compile(r"NOT SUCCESS|\bverdict\W*no\b", re.IGNORECASE)


def read_as_released(stage: str, fault: str, text: str) -> bool:
    """What the released codes of WebGym and AsyncWebRL make of a reply without a usable verdict.

    No for the stages relevance and blocked, and for a request without a reply or with an empty one. For the others any
    text without a negative verdict is a yes.
    """
    readable = fault in _READABLE and bool(text.strip())
    return stage not in ("relevance", "blocked") and readable and _NEGATIVE.search(text) is None
