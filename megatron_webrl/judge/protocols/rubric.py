"""The rubric judge of WebGym: relevance of each screenshot, blocked, supported, each fact, reference answer.

    blocked?     yes: masks the episode                    (also without an answer)
    no answer:   failure
    relevant?    each screenshot but the last, concurrently; without a usable reply the screenshot is kept
    supported?   no: failure
    fact 1?, fact 2?, ...  in order; the first no: failure
    agrees with the reference, if there is one?  no: failure
    success

The blocked stage comes first because it needs no other and saves all others where it masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from megatron_webrl.config.judge import RubricConfig
from megatron_webrl.judge.episode_view import EpisodeView, Screenshot
from megatron_webrl.judge.protocols.base import Finding, no_answer
from megatron_webrl.judge.questions import Asker, Question, ask_all
from megatron_webrl.types import BLOCKED

RELEVANCE_TOKENS, BLOCKED_TOKENS, VERDICT_TOKENS = 600, 500, 800  # limits of replies, as published


class RubricProtocol:
    """See the module."""

    name: ClassVar[str] = "rubric"
    stages: ClassVar[Sequence[str]] = ("relevance", "blocked", "supported", "rubric", "reference")

    def __init__(self, settings: RubricConfig) -> None:
        self._settings = settings

    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        """Raises Undecided without a usable answer to any question but relevance, and BudgetSpent."""
        blocked = await asker.require(
            Question(
                "blocked", "blocked", (("TASK", episode.task), ("PAGES", episode.pages)),
                episode.evenly_sampled(self._settings.blocked_screenshots), BLOCKED_TOKENS,
            )
        )  # fmt: skip
        if blocked.yes:
            return Finding(BLOCKED, f"blocked: {blocked.text}")
        if episode.answer is None:
            return no_answer()
        shots = await self._relevant(episode, asker)
        given = (("TASK", episode.task), ("ANSWER", episode.answer))
        history = (("ACTIONS", episode.actions), ("PAGES", episode.pages))
        questions = [Question("supported", "verdict", (*given, *history), shots, VERDICT_TOKENS)]
        for number, (description, fact) in enumerate(episode.facts, 1):
            context = (("RUBRIC", description),) if description else ()
            fields = (*given, *context, ("FACT", fact), history[0])
            questions.append(Question("rubric", "verdict", fields, shots, VERDICT_TOKENS, f"fact {number}"))
        if episode.reference is not None:
            fields = (*given, ("REFERENCE", episode.reference))
            questions.append(Question("reference", "verdict", fields, shots, VERDICT_TOKENS))
        for question in questions:
            answer = await asker.require(question)
            if not answer.yes:
                return Finding("failure", f"{question.subject or question.stage}: {answer.text}")
        return Finding("success", f"{len(questions)} of {len(questions)} questions")

    async def _relevant(self, episode: EpisodeView, asker: Asker) -> tuple[Screenshot, ...]:
        """The latest relevant screenshots, and always the last one."""
        *earlier, last = episode.screenshots or (None,)
        if last is None:
            return ()
        answers = await ask_all([
            asker.ask(
                Question("relevance", "relevance", (("TASK", episode.task),), (shot,), RELEVANCE_TOKENS,
                         f"screenshot {shot.number}")
            )
            for shot in earlier if shot is not None
        ])  # fmt: skip
        kept = [shot for shot, answer in zip(earlier, answers, strict=True) if shot and answer.value is not False]
        return (*kept, last)[-self._settings.max_screenshots :]
