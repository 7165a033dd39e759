"""Read a request of the judge, and write replies, right ones and faulty ones."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_webrl.judge.protocols import PROTOCOLS
from megatron_webrl.judge.questions import NAMES, NONCE_DIGITS, PromptFiles
from megatron_webrl.judge.replies import FORMS

REASON = "The endpoint's oracle decided this."
IMAGE_TOKENS = 1_000
_FENCE = re.compile(rf"----- (BEGIN|END) ({'|'.join(NAMES)}) ([0-9a-f]{{{NONCE_DIGITS}}}) -----")


class NotAQuestion(ValueError):
    """A request that is none of the judge's questions."""


@dataclass(frozen=True)
class ChatQuestion:
    """One question as the endpoint received it."""

    protocol: str
    stage: str
    form: str  # one of replies.FORMS
    mode: str  # one of replies.MODES
    fields: dict[str, str]
    images: list[bytes]
    body: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.body, sort_keys=True).encode()).hexdigest()

    @property
    def prompt_tokens(self) -> int:
        texts = [m["content"] if isinstance(m["content"], str) else "" for m in self.body["messages"]]
        return sum(map(len, [*texts, *self.fields.values()])) // 4 + IMAGE_TOKENS * len(self.images)


def parse_fences(text: str) -> dict[str, str]:
    """The data of a text of `fence_fields`, by name. Raises ValueError if the fences are not balanced and unique."""
    fields: dict[str, str] = {}
    name, nonce = "", ""
    data: list[str] = []
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if not name:
            if match and match[1] == "BEGIN" and match[3] == (nonce or match[3]) and match[2] not in fields:
                name, nonce, data = match[2], match[3], []
                continue
            raise ValueError(f"text outside of the fences: {line[:80]!r}")
        if match and match.groups() == ("END", name, nonce):
            fields[name], name = "\n".join(data), ""
        elif nonce in line:
            raise ValueError(f"the nonce occurs within {name}")
        else:
            data.append(line)
    if name:
        raise ValueError(f"the fence {name} does not end")
    return fields


class QuestionReader:
    """Recognises questions by their system message."""

    def __init__(self, prompts: str | Path) -> None:
        """Raises ConfigError for missing prompt files."""
        self._files = [PromptFiles.load(prompts, kind.folder, kind.stages) for kind in PROTOCOLS.values()]

    def read(self, body: Any) -> ChatQuestion:
        """Raises NotAQuestion."""
        try:
            system, user = body["messages"]
            parts = [part for part in user["content"] if part["type"] == "text"]
            urls = [part["image_url"]["url"] for part in user["content"] if part["type"] == "image_url"]
            images = [base64.b64decode(url.partition("base64,")[2], validate=True) for url in urls]
            if (system["role"], user["role"]) != ("system", "user"):
                raise NotAQuestion("the messages are not of system and user")
            files, stage, form, mode = self._recognise(system["content"], "response_format" in body)
            return ChatQuestion(files.protocol, stage, form, mode, parse_fences(parts[0]["text"]), images, body)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise NotAQuestion(f"{type(error).__name__}: {error}") from error

    def _recognise(self, system: str, schema: bool) -> tuple[PromptFiles, str, str, str]:
        mode = "schema" if schema else "line"
        for files in self._files:
            for stage in files.stages:
                for form in FORMS.values():
                    if system == files.system_message(stage, form, mode):
                        return files, stage, form.name, mode
        raise NotAQuestion("the system message is of no prompt file of configs/judge")


def right_reply(question: ChatQuestion, decision: bool, reason: str = REASON) -> str:
    """A reply of exactly the asked form."""
    if question.form == "key_points":
        points = [line.strip() for line in question.fields["TASK"].splitlines() if line.strip()][:5] or ["The task."]
        if question.mode == "schema":
            return json.dumps({"key_points": points})
        return "\n".join([*points, "END OF KEY POINTS"])
    value: str | int = (5 if decision else 1) if question.form == "score" else ("yes" if decision else "no")
    if question.mode == "schema":
        return json.dumps({"reason": reason, question.form: value})
    return f"{reason}\n\n{question.form.upper()}: {value}"


def faulty_reply(question: ChatQuestion, decision: bool, fault: str) -> tuple[str | None, str]:
    """Content and finish_reason of a faulty reply; what can be read from it without care is the wrong decision."""
    wrong = right_reply(question, not decision)
    if fault == "truncated":
        return (wrong if question.mode == "line" else wrong.rstrip("}")), "length"
    if fault == "broken_reply":
        return (wrong.removesuffix("}") if question.mode == "schema" else f"{wrong}."), "stop"
    if fault == "empty":
        return None, "stop"
    if fault == "refusal":
        return "I cannot help with that.", "content_filter"
    if fault == "wrong_schema":
        return _wrong_schema(question, decision), "stop"
    if question.form == "key_points":
        return '{"key_points": [], "key_points": ["a"]}' if question.mode == "schema" else "END OF KEY POINTS", "stop"
    both = f"{wrong}\n{right_reply(question, decision)}"
    if question.mode == "schema":
        name, value = question.form, json.loads(wrong)[question.form]
        other = json.loads(right_reply(question, decision))[name]
        both = f'{{"reason": "{REASON}", "{name}": {json.dumps(other)}, "{name}": {json.dumps(value)}}}'
    return both, "stop"


def _wrong_schema(question: ChatQuestion, decision: bool) -> str:
    if question.form == "key_points":
        return json.dumps({"points": "all"})
    if question.mode == "line":
        return f"{question.form.upper()} = {'no' if decision else 'yes'}"
    value: Any = (1 if decision else 5) if question.form == "score" else not decision
    return json.dumps({"reason": REASON, question.form: value, "confidence": 1.0})


def completion(question: ChatQuestion, content: str | None, finish_reason: str) -> dict[str, Any]:
    """The body of a response."""
    tokens = len(content or "") // 4
    usage = {"prompt_tokens": question.prompt_tokens, "completion_tokens": tokens}
    message = {"role": "assistant", "content": content, "refusal": None}
    return {
        "id": f"chatcmpl-{question.digest[:16]}",
        "object": "chat.completion",
        "created": 0,
        "model": question.body.get("model", ""),
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }
