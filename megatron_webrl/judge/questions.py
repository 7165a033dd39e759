"""What a judge is asked: prompts, fenced page text, the view of an episode, questions.

Fences around data that a judge model must not take for instructions: the task, the answer, titles, URLs, actions.

    ----- BEGIN ANSWER 5f0c1d2e3a4b -----
    the data
    ----- END ANSWER 5f0c1d2e3a4b -----

The nonce is derived from a digest of all data of the request, so that equal requests are equal, and does not occur in
them: nobody can write the closing line of a fence into its data. Data that look like a fence, or like a special token
of a chat template, are rewritten.

The prompt files of a protocol: <folder>/<protocol>/<stage>.md, and what all protocols share in <folder>/common/.

A system message is the stage's text, common/data.md (what fences are), and common/<form>.<mode>.md (the reply's form).
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.client import VERDICT_SLOT, JudgeClient, RequestFailed, Spending
from megatron_webrl.judge.replies import (
    FORMS,
    MODES,
    VERDICT,
    ReplyForm,
    UnusableReply,
    Value,
    parse_reply,
    read_as_released,
)
from megatron_webrl.types import Action, JudgeStage, Trajectory
from megatron_webrl.util.image_type import data_url
from megatron_webrl.util.shipped import find_shipped
from megatron_webrl.util.text import shorten

NAMES = ("TASK", "ANSWER", "RUBRIC", "FACT", "REFERENCE", "ACTIONS", "PAGES", "KEY_POINTS", "NOTES", "TRAJECTORY")
MAX_FIELD_CHARS = 20_000
NONCE_DIGITS = 12

_BREAKS = re.compile("\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")
_FENCE_WORD = re.compile(r"[\W_]*(?:BEGIN|END)\b", re.IGNORECASE)
_DASHES = re.compile("[-=_*#~\u2010-\u2015\u2500\u2501]{3}")
_TOKEN_NAMES = (
    "think|tool_call|tool_response|tools|s|bos|eos|pad|unk|mask|image|img|video|audio|box|quad|ref|system|user|"
    r"assistant|im_start|im_end|start_of_turn|end_of_turn|start_of_image|end_of_image|sys"
)
_TOKENS = re.compile(rf"<[^\S\n]*(?=[|\uff5c]|<\s*/?\s*sys|/?\s*(?:{_TOKEN_NAMES})\s*>)", re.IGNORECASE)
_BRACKET_TOKENS = re.compile(r"\[(?=/?(?:INST|SYS|IMG|TOOL|AVAILABLE|SYSTEM)[A-Z_]*\])", re.IGNORECASE)


def fence_fields(fields: Sequence[tuple[str, str]]) -> str:
    """The data of a request in fences, in order. Raises ValueError for a name that is not one of NAMES."""
    cleaned = [(name, clean_data(text)) for name, text in fields]
    nonce = _nonce(cleaned)
    lines = []
    for name, text in cleaned:
        if name not in NAMES:
            raise ValueError(f"fence {name!r} is not one of {', '.join(NAMES)}")
        lines += [f"----- BEGIN {name} {nonce} -----", text, f"----- END {name} {nonce} -----"]
    return "\n".join(lines)


def clean_data(text: str) -> str:
    """Data as they stand in a fence: line breaks unified, invisible characters removed, fences and special tokens
    rewritten, at most MAX_FIELD_CHARS characters."""
    text = _INVISIBLE.sub("", _BREAKS.sub("\n", text))
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
    if len(text) > MAX_FIELD_CHARS:
        left_out = len(text) - MAX_FIELD_CHARS
        text = f"{text[:MAX_FIELD_CHARS]}\n({left_out} more characters are not shown)"
    text = _BRACKET_TOKENS.sub("[ ", _TOKENS.sub("< ", text))
    return "\n".join(map(_clean_line, text.split("\n")))


def _clean_line(line: str) -> str:
    """The line; one that looks like a fence loses its beginning, up to the word."""
    match = _FENCE_WORD.match(line)
    return f"(not a fence) {line[match.end() :]}" if match and _DASHES.search(line) else line


def _nonce(fields: Sequence[tuple[str, str]]) -> str:
    digest = hashlib.sha256("\0".join(part for field in fields for part in field).encode())
    while any(digest.hexdigest()[:NONCE_DIGITS] in text for _, text in fields):
        digest.update(b"again")
    return digest.hexdigest()[:NONCE_DIGITS]


COMMON = ("data", *(f"{form}.{mode}" for form in FORMS for mode in MODES))
DIGEST_DIGITS = 16


@dataclass(frozen=True)
class PromptFiles:
    """The texts of one protocol."""

    protocol: str
    stages: dict[str, str]
    common: dict[str, str]
    digest: str  # of names and texts of all files

    @classmethod
    def load(cls, folder: str | Path, protocol: str, stages: Sequence[str]) -> PromptFiles:
        """Read the files of `stages`; those of configs/ are also found in the package. Raises ConfigError."""
        root = find_shipped(folder)
        if not root.is_dir():
            raise ConfigError(f"judge.prompts={folder} is not a folder; name one with the files of configs/judge")
        named = {stage: _read(root / protocol / f"{stage}.md") for stage in sorted(stages)}
        common = {name: _read(root / "common" / f"{name}.md") for name in sorted(COMMON)}
        digest = hashlib.sha256()
        for name, text in [*named.items(), *common.items()]:
            digest.update(f"{name}\0{text}\0".encode())
        return cls(protocol, named, common, digest.hexdigest()[:DIGEST_DIGITS])

    def system_message(self, stage: str, form: ReplyForm, mode: str) -> str:
        """The system message of a question; `mode` is one of replies.MODES."""
        return "\n\n".join((self.stages[stage], self.common["data"], self.common[f"{form.name}.{mode}"]))


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"judge.prompts: {path}: {reason}; every stage of a protocol needs its file") from error
    if not text:
        raise ConfigError(f"judge.prompts: {path} is empty; every stage of a protocol needs its text")
    return text


@dataclass(frozen=True)
class Screenshot:
    """One screenshot of an episode."""

    number: int  # from 1, in the order of the episode
    image: bytes  # encoded: PNG, JPEG or WebP

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.image).hexdigest()

    @cached_property
    def data_url(self) -> str:
        return data_url(self.image)


@dataclass(frozen=True)
class EpisodeView:
    """The material of a verdict. All texts but none of the structure may be written by pages or by the agent."""

    task: str
    answer: str | None  # None: the episode ended without one
    reference: str | None
    facts: tuple[tuple[str, str], ...]  # description of the fact's group, fact
    fact_groups: tuple[str, ...]  # description of each group, or its facts if it has none
    actions: str  # one line a step
    trajectory: str  # reasoning and action of each step
    pages: str  # one line a screenshot
    screenshots: tuple[Screenshot, ...]  # without repetitions of the one before

    @classmethod
    def of(cls, trajectory: Trajectory) -> EpisodeView:
        """The view of an episode. An answer of white space only is none."""
        answer = trajectory.answer if trajectory.answer and trajectory.answer.strip() else None
        facts = trajectory.task.facts
        return cls(
            task=trajectory.instruction,
            answer=answer,
            reference=trajectory.task.answer,
            facts=tuple((fact.description, fact.fact) for fact in facts),
            fact_groups=tuple(
                text for _, text in dict.fromkeys((fact.group, fact.description or fact.fact) for fact in facts)
            ),
            actions="\n".join(_actions(trajectory)),
            trajectory=_with_reasoning(trajectory, _actions(trajectory)),
            pages=_pages(trajectory) if trajectory.browser_images is None else "",
            screenshots=_distinct([bytes(image) for image in _screenshots(trajectory)]),
        )

    def evenly_sampled(self, count: int) -> tuple[Screenshot, ...]:
        """At most `count` screenshots, which is at least 2; first and last are among them."""
        shots = self.screenshots
        if len(shots) <= count:
            return shots
        return tuple(shots[round(place * (len(shots) - 1) / (count - 1))] for place in range(count))


def _screenshots(trajectory: Trajectory) -> Sequence[bytes]:
    shown = trajectory.browser_images
    return trajectory.images if shown is None else [trajectory.images[index] for index in shown]


def _distinct(images: Sequence[bytes]) -> tuple[Screenshot, ...]:
    """The last of each series of equal screenshots, so that the final one always counts as the last."""
    numbered = list(enumerate(images, 1))
    return tuple(
        Screenshot(number, image)
        for number, image in numbered
        if number == len(numbered) or numbered[number][1] != image
    )


def _with_reasoning(trajectory: Trajectory, actions: Sequence[str]) -> str:
    """The reasoning of each step above its action. It is shortened so that no step of a long episode is lost."""
    label = len("Reasoning: \n\n")
    limit = max(3, (MAX_FIELD_CHARS - sum(map(len, actions))) // max(1, len(actions)) - label)
    reasonings = (shorten(" ".join(step.reasoning.split()), limit) for step in trajectory.steps)
    return "\n".join(
        f"Reasoning: {text}\n{action}" if text else action for text, action in zip(reasonings, actions, strict=True)
    )


def _actions(trajectory: Trajectory) -> list[str]:
    lines = []
    for number, step in enumerate(trajectory.steps, 1):
        effect = "page changed" if step.page_changed else "page unchanged"
        if step.action is not None:
            done = f"{_action_text(step.action)}; {effect}"
        else:
            done = "no valid action" if step.format_error else f"asked the model; {effect}"  # a harness
        lines.append(f"{number}. {done}")
    return lines


def _action_text(action: Action) -> str:
    """All arguments of an action in full, each on the same line: `type text="abc" element_id=5`."""
    names = ("text", "url", "direction", "time", "tab", "element_id", "coordinate", "end_element_id", "end_coordinate")
    values = {name: value for name in names if (value := getattr(action, name)) is not None}
    return " ".join([action.kind, *(f"{name}={json.dumps(v, ensure_ascii=False)}" for name, v in values.items())])


def _pages(trajectory: Trajectory) -> str:
    """Title and URL of each screenshot that a step acted on."""
    pages = {
        int(step.images[-1]) + 1: f"{' '.join(step.title.split())} | {step.url}"
        for step in trajectory.steps if len(step.images) and (step.title or step.url)
    }  # fmt: skip
    return "\n".join(f"screenshot {number}: {page}" for number, page in sorted(pages.items()))


MAX_STAGE_TEXT_CHARS = 1_000
TEMPERATURE, TOP_P = 0.7, 0.95  # of requests, unless the model's options replace them
RELEVANT_SCORE = 3  # a score of at least this is a yes


@dataclass(frozen=True)
class Question:
    """One question about an episode."""

    stage: str  # names the prompt file
    slot: str  # one of client.SLOTS
    fields: tuple[tuple[str, str], ...]  # name of the fence, data
    screenshots: tuple[Screenshot, ...]
    max_tokens: int
    subject: str = ""
    form: ReplyForm = VERDICT


@dataclass(frozen=True)
class Answer:
    """The reply to a question. `value` is None if no attempt gave a usable one (judge.unusable_replies)."""

    value: Value | None
    text: str
    fault: str = ""  # the last one, without a value

    @property
    def yes(self) -> bool:
        return self.value is True


class Undecided(Exception):
    """A question that a verdict needs has no usable answer."""


class Asker:
    """Asks the questions of one verdict, and keeps their stages in the order of asking."""

    def __init__(
        self, client: JudgeClient, prompts: PromptFiles, settings: JudgeConfig, deadline: float, voter: str
    ) -> None:
        """`deadline`: loop time; `voter`: the slot of the model that gives the verdict."""
        self._client, self._prompts, self.settings, self._deadline = client, prompts, settings, deadline
        self._voter = voter
        self.max_screenshots: int = getattr(settings, "max_screenshots", 1)  # shown with a verdict
        self.stages: list[JudgeStage] = []
        self.spending = Spending()

    async def ask(self, question: Question) -> Answer:
        """Ask until a reply is usable, at most judge.attempts times. Raises BudgetSpent."""
        place, mode = len(self.stages), self.settings.structured
        slot = self._voter if question.slot == VERDICT_SLOT else question.slot
        body, digest = self._request(question, slot)
        model = self._client.models[slot].name
        self.stages.append(JudgeStage(question.stage, question.subject, "none", "", digest, model, attempts=0))
        faults: list[str] = []
        value: Value | None = None
        text, attempts = "", 0
        while value is None and attempts < self.settings.attempts:
            attempts += 1
            try:
                reply = await self._client.complete(
                    slot, body, len(question.screenshots), self._deadline, self.spending
                )
                value, text = parse_reply(question.form, mode, reply.content, reply.finish_reason)
            except UnusableReply as error:
                text = error.text
                faults.append(error.name)
                if isinstance(error, RequestFailed):
                    break
        if value is None and self.settings.unusable_replies == "as_released":
            value = read_as_released(question.stage, faults[-1], text)
        self.stages[place] = replace(
            self.stages[place], decision=decide(value), attempts=attempts,
            text=shorten(text or ("" if value is None else str(value)), MAX_STAGE_TEXT_CHARS), errors=tuple(faults),
        )  # fmt: skip
        return Answer(value, text, "" if value is not None else faults[-1])

    async def require(self, question: Question) -> Answer:
        """The usable answer to a question. Raises Undecided without one, and BudgetSpent."""
        answer = await self.ask(question)
        if answer.value is None:
            subject = f" of {question.subject}" if question.subject else ""
            raise Undecided(f"{question.stage}{subject}: {answer.fault}")
        return answer

    def _request(self, question: Question, slot: str) -> tuple[dict[str, Any], str]:
        """A question as arguments of chat.completions, without the model, and the digest of everything on which the
        reply depends, of screenshots their own."""
        form, model = question.form, self._client.models[slot]
        arguments = {"max_tokens": question.max_tokens, "temperature": TEMPERATURE, "top_p": TOP_P, **model.options}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if self.settings.structured == "schema":
            schema = {"name": form.name, "strict": True, "schema": form.schema()}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        system = self._prompts.system_message(question.stage, form, self.settings.structured)
        digested = [fence_fields(question.fields)]
        content: list[dict[str, Any]] = [{"type": "text", "text": digested[0]}]
        for shot in question.screenshots:
            digested += [name := f"Screenshot {shot.number}:", shot.digest]
            image = {"type": "image_url", "image_url": {"url": shot.data_url, "detail": "high"}}
            content += [{"type": "text", "text": name}, image]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        digest = json.dumps([model.name, system, digested, arguments], sort_keys=True)
        return {**arguments, "messages": messages}, hashlib.sha256(digest.encode()).hexdigest()


def decide(value: Value | None) -> str:
    """The decision of a stage: a verdict's own, of a score whether it is high enough; a text is a yes."""
    if value is None:
        return "none"
    return "yes" if isinstance(value, str) or value is True or value >= RELEVANT_SCORE else "no"
