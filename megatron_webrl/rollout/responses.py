"""Response forms: the fields that a model writes before its tool call, and reading them back.

Memory: {"price of the lamp": "12.50"}
Progress: {"find the price": "finished", "answer": "not finished"}
Intention: answer
Action: Give the price as the answer.
<tool_call>...</tool_call>
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from functools import cache

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
FIELDS = ("Memory", "Progress", "Intention", "Action")  # in the order of a response

_TAG = re.compile("|".join((THOUGHT_OPEN, THOUGHT_CLOSE, TOOL_CALL_OPEN, TOOL_CALL_CLOSE)))
_JSON, _BEFORE_OBJECT = json.JSONDecoder(), re.compile(r"\s*(?={)")
_EMPTY_JSON = ("", "{}", "[]", '""', "null")


@dataclass(frozen=True)
class ResponseForm:
    """What a response consists of."""

    lines: tuple[str, ...]  # of the system message: one for each field, in order
    rules: tuple[str, ...] = ()  # of the system message
    carried: tuple[str, ...] = ()  # fields of which every later prompt has the latest text

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in order."""
        return tuple(line.partition(":")[0] for line in self.lines)


_ACTION = "Action: one short sentence that says what you do on the page"
_PROGRESS = 'Progress: a JSON object, each part of the task with "finished" or "not finished"'
_MEMORY_FIELDS = (
    'Memory: a JSON object, each fact that you need later with its name, such as {"price of the lamp": "12.50"}',
    _PROGRESS,
    "Intention: the part of the task, as Progress names it, that this step serves",
    _ACTION,
)
_SPLIT_RULE = "You may split or rename the parts of Progress as you learn more."
_JSON_RULE = "Write the JSON of Memory and Progress on one line each, with what this step has shown you."

FORMS = {
    "bare": ResponseForm(()),
    "vanilla": ResponseForm((_ACTION,)),
    "progress": ResponseForm(
        (_PROGRESS, _ACTION),
        (
            "Write the JSON of Progress on one line, with what this step has shown you.",
            "Note facts that you need later, such as prices, names and dates, in Progress too.",
            f"{_SPLIT_RULE} Keep every fact that is still needed.",
        ),
        ("Progress",),
    ),
    "memory_additive": ResponseForm(
        _MEMORY_FIELDS,
        (_JSON_RULE, "Repeat all of your last Memory unchanged and add new facts at its end.", _SPLIT_RULE),
        ("Memory", "Progress"),
    ),
    "memory_compressive": ResponseForm(
        _MEMORY_FIELDS,
        (
            _JSON_RULE,
            "Rewrite Memory at each step: keep the facts that the rest of the task needs, leave out the others.",
            _SPLIT_RULE,
        ),
        ("Memory", "Progress"),
    ),
    "memory_compact": ResponseForm(
        ("Memory: your last notes, unchanged, then new ones; each ends with a semicolon",), carried=("Memory",)
    ),
}
"""By rollout.context.response_format: docs/rollout.md."""


def split_thinking(response: str) -> tuple[str, str]:
    """Thoughts and answer of a response.

    The answer begins after the last </think>, and ends at a <think> after it: a thought that was cut off. Tags inside
    the JSON object of a tool call are data.
    """
    tags = _tags(response)
    start = max((tag.end() for tag in tags if tag[0] == THOUGHT_CLOSE), default=0)
    end = next((tag.start() for tag in tags if tag[0] == THOUGHT_OPEN and tag.start() >= start), len(response))
    thoughts = (
        response[:start].removesuffix(THOUGHT_CLOSE).strip().removeprefix(THOUGHT_OPEN),
        response[end:].removeprefix(THOUGHT_OPEN),
    )
    answer = response[start:end]
    return "\n".join(filter(None, map(str.strip, thoughts))), answer.lstrip() if start else answer


def strip_thinking(response: str) -> str:
    """The answer of a response, without its thoughts."""
    return split_thinking(response)[1]


def split_calls(answer: str) -> list[str]:
    """The tags of tool calls and the text around them, in turns: [before, "<tool_call>", call, "</tool_call>", after].

    Tags inside the JSON object of a call are data.
    """
    pieces, start = list[str](), 0
    for tag in _tags(answer):
        if tag[0] in (TOOL_CALL_OPEN, TOOL_CALL_CLOSE):
            pieces += [answer[start : tag.start()], tag[0]]
            start = tag.end()
    return [*pieces, answer[start:]]


def _tags(text: str) -> list[re.Match[str]]:
    """The tags of thoughts and tool calls, except those inside the JSON object after a <tool_call>."""
    tags, start = list[re.Match[str]](), 0
    while tag := _TAG.search(text, start):
        tags.append(tag)
        start = tag.end()
        if tag[0] == TOOL_CALL_OPEN and (space := _BEFORE_OBJECT.match(text, start)):
            with contextlib.suppress(ValueError, RecursionError):  # not JSON: its tags count
                start = _JSON.raw_decode(text, space.end())[1]
    return tags


@cache
def _field_pattern(further: tuple[str, ...] = ()) -> re.Pattern[str]:
    names = "|".join(map(re.escape, dict.fromkeys((*FIELDS, *further))))
    return re.compile(rf"^[ \t]*(?:\*\*)?({names})(?:\*\*)?[ \t]*:(?:\*\*)?", re.MULTILINE)


def split_fields(response: str, further: tuple[str, ...] = ()) -> dict[str, str]:
    """The text of each field of a response without thoughts; of a field that occurs twice the last. `further`: fields
    beside FIELDS.

    A field begins on a line of its own and ends before the next field or the tool call. The last field of a response
    without a tool call is left out, as it may have been cut off.
    """
    call = response.find(TOOL_CALL_OPEN)
    found = list(_field_pattern(further).finditer(response))
    fields: dict[str, str] = {}
    for match, following in zip(found, [*(later.start() for later in found[1:]), call], strict=False):
        end = min(following, call) if call >= 0 else following
        if text := response[match.end() : max(end, 0)].strip():
            fields[match[1]] = text
    return fields


def reasoning_of(response: str) -> str:
    """The thoughts of a response, and what it says before its first tool call."""
    thoughts, answer = split_thinking(response)
    return "\n".join(filter(None, (thoughts, split_calls(answer)[0].strip())))


def is_empty_json(text: str) -> bool:
    """Whether a field holds nothing: no text, or an empty JSON value."""
    return "".join(text.split()) in _EMPTY_JSON


def memory_characters(response: str) -> int:
    """Characters of the Memory that a response writes outside of thoughts: 0 if it is empty, -1 if it is missing."""
    answer = strip_thinking(response)
    if not any(match[1] == "Memory" for match in _field_pattern().finditer(answer)):
        return -1
    text = split_fields(answer).get("Memory", "")
    return 0 if is_empty_json(text) else len(text)
