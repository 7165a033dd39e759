"""Ask a judge model one question: cache, structured reply, further attempts; every question leaves a stage."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.judge.cache import CachedReply, ReplyCache
from megatron_webrl.judge.client import JudgeClient, JudgeModel, RequestFailed, SchemaRefused, Spending
from megatron_webrl.judge.episode_view import Screenshot
from megatron_webrl.judge.fences import fence_fields
from megatron_webrl.judge.prompts import PromptFiles
from megatron_webrl.judge.replies import VERDICT, ReplyForm, UnusableReply, Value, parse_reply
from megatron_webrl.types import JudgeStage
from megatron_webrl.util.text import shorten

MAX_STAGE_TEXT_CHARS = 1_000
MAX_STAGE_FAULTS = 20  # names of faults that a stage keeps; an outage of minutes has many
TEMPERATURE, TOP_P = 0.7, 0.95  # of requests, unless the model's options replace them
RELEVANT_SCORE = 3  # a score of at least this is a yes
T = TypeVar("T")


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
    """The reply to a question. `value` is None if no attempt gave a usable one."""

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
        self, client: JudgeClient, prompts: PromptFiles, settings: JudgeConfig, cache: ReplyCache, deadline: float
    ) -> None:
        """`deadline`: loop time."""
        self._client, self._prompts, self._settings = client, prompts, settings
        self._cache, self._deadline = cache, deadline
        self._stages: list[JudgeStage] = []
        self.spending = Spending()

    @property
    def stages(self) -> tuple[JudgeStage, ...]:
        return tuple(self._stages)

    async def ask(self, question: Question) -> Answer:
        """Ask until a reply is usable, at most judge.attempts times. Raises BudgetSpent."""
        place = len(self._stages)
        model = self._client.models[question.slot]
        self._stages.append(JudgeStage(question.stage, question.subject, "none", "", "", model.name, attempts=0))
        faults: list[str] = []
        text, attempts = "", 0
        while attempts < self._settings.attempts:
            mode = self._client.mode(question.slot)
            request = _Request.build(question, self._prompts, self._settings, mode, model)
            try:
                known = self._cached(question, mode, request.digest)
                if known is None:
                    attempts += 1
                    known = await self._send(question, mode, request, faults)
                answer = Answer(*known)
                self._record(place, decide(known[0]), known[1] or str(known[0]), request.digest, attempts, faults)
                return answer
            except SchemaRefused:
                attempts -= 1
                continue
            except UnusableReply as error:
                text = error.text
                faults.append(error.name)
            except RequestFailed as error:
                text = error.text
                faults += [error.name] if faults[-1:] != [error.name] else []
                self._record(place, "none", text, request.digest, attempts, faults)
                break
            self._record(place, "none", text, request.digest, attempts, faults)
        return Answer(None, text, faults[-1])

    async def require(self, question: Question) -> Answer:
        """The usable answer to a question. Raises Undecided without one, and BudgetSpent."""
        answer = await self.ask(question)
        if answer.value is None:
            subject = f" of {question.subject}" if question.subject else ""
            raise Undecided(f"{question.stage}{subject}: {answer.fault}")
        return answer

    def _cached(self, question: Question, mode: str, digest: str) -> tuple[Value, str] | None:
        """The parsed reply of the cache, if it has a usable one."""
        reply = self._cache.get(digest)
        try:
            return None if reply is None else parse_reply(question.form, mode, reply.content, "stop")
        except UnusableReply:
            return None

    async def _send(self, question: Question, mode: str, request: _Request, faults: list[str]) -> tuple[Value, str]:
        """One attempt. Raises UnusableReply, RequestFailed, SchemaRefused, BudgetSpent."""
        reply = await self._client.complete(
            question.slot, request.body(), len(question.screenshots), self._deadline, self.spending, faults
        )
        fault = ""
        try:
            found = parse_reply(question.form, mode, reply.content, reply.finish_reason)
        except UnusableReply as error:
            fault = error.name
            raise
        finally:
            if mode == "schema":
                self._client.note_schema_reply(question.slot, fault)
        self._cache.put(request.digest, CachedReply(reply.content, reply.prompt_tokens, reply.response_tokens))
        return found

    def _record(self, place: int, decision: str, text: str, digest: str, attempts: int, faults: list[str]) -> None:
        self._stages[place] = replace(
            self._stages[place], decision=decision, text=shorten(text, MAX_STAGE_TEXT_CHARS), digest=digest,
            attempts=attempts, errors=tuple(faults[:MAX_STAGE_FAULTS]),
        )  # fmt: skip


def decide(value: Value) -> str:
    """The decision of a stage: a verdict's own, of a score whether it is high enough; a text is a yes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "yes" if isinstance(value, str) or value >= RELEVANT_SCORE else "no"


async def ask_all(questions: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Ask concurrently; the first exception cancels the others."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class _Request:
    """A question as a chat. Its digest covers everything that the reply depends on, screenshots by their own."""

    system: str
    parts: tuple[str | Screenshot, ...]
    arguments: dict[str, Any]
    digest: str

    @classmethod
    def build(
        cls, question: Question, prompts: PromptFiles, settings: JudgeConfig, mode: str, model: JudgeModel
    ) -> _Request:  # fmt: skip
        form = question.form
        parts: list[str | Screenshot] = [fence_fields(question.fields)]
        for shot in question.screenshots:
            parts += [f"Screenshot {shot.number}:", shot]
        arguments: dict[str, Any] = {
            "max_tokens": question.max_tokens, "temperature": TEMPERATURE, "top_p": TOP_P,
        } | dict(model.options)  # fmt: skip
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if mode == "schema":
            schema = {"name": form.name, "strict": True, "schema": form.schema(settings.max_reason_chars)}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        system = prompts.system_message(question.stage, form, mode)
        plain = [part if isinstance(part, str) else part.digest for part in parts]
        content = json.dumps([model.name, system, plain, arguments], sort_keys=True)
        return cls(system, tuple(parts), arguments, hashlib.sha256(content.encode()).hexdigest())

    def body(self) -> dict[str, Any]:
        """Arguments of chat.completions, without the model."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": part.data_url, "detail": "high"}}
            for part in self.parts
        ]  # fmt: skip
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": content}]
        return {**self.arguments, "messages": messages}
