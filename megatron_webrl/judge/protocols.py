"""Judge protocols: rubric, WebJudge, WebVoyager.

The rubric judge of WebGym: relevance of each screenshot, blocked, supported, each fact, reference answer.

    blocked?     yes: masks the episode                    (also without an answer)
    no answer:   failure
    relevant?    each screenshot but the last, concurrently; without a usable reply the screenshot is kept
    supported?   no: failure
    fact 1?, fact 2?, ...  in order; the first no: failure
    agrees with the reference, if there is one?  no: failure
    success

The blocked stage comes first because it needs no other and saves all others where it masks.

WebJudge, the protocol of Online-Mind2Web (arXiv 2504.01382): key points, a score for each screenshot, outcome.

The key points of the task are listed first. Each screenshot gets a score from 1 to 5; those with at least 3 are shown
to the last question, with the notes that were made of them. An episode without an answer can be a success, since many
of its tasks ask for an effect only. Websites that block the agent are not told apart.

WebVoyager's protocol (arXiv 2401.13919): one question about task, answer and the last screenshots.

Their evaluation shows the last k screenshots, and counts an episode without an answer as a failure. k is
judge.max_screenshots here; published results use 15.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_webrl.judge.questions import RELEVANT_SCORE, Asker, EpisodeView, Question, Screenshot
from megatron_webrl.judge.replies import KEY_POINTS, SCORE
from megatron_webrl.types import BLOCKED
from megatron_webrl.util.concurrency import run_together


@dataclass(frozen=True)
class Finding:
    """The outcome of a protocol."""

    outcome: str  # "success", "failure" or types.BLOCKED
    reason: str


class JudgeProtocol(ABC):
    """The questions of a verdict, in order, and what follows from the answers."""

    name: ClassVar[str]
    stages: ClassVar[Sequence[str]]  # prompt files that it needs

    def __init__(self, settings: Any) -> None:
        """`settings`: those of the protocol, of config.judge.PROTOCOLS."""
        self._settings = settings

    @abstractmethod
    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        """Judge an episode with a regular end. Raises Undecided without a usable answer, and BudgetSpent."""


NO_ANSWER = Finding("failure", "the agent gave no answer")

RELEVANCE_TOKENS, BLOCKED_TOKENS, VERDICT_TOKENS = 600, 500, 800  # limits of replies, as published
BLOCKED_SCREENSHOTS = 20  # evenly sampled, as published


class RubricProtocol(JudgeProtocol):
    """See the module."""

    name: ClassVar[str] = "rubric"
    stages: ClassVar[Sequence[str]] = ("relevance", "blocked", "supported", "rubric", "reference")

    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        """Raises Undecided without a usable answer to any question but relevance, and BudgetSpent."""
        blocked = await asker.require(
            Question(
                "blocked", "relevance", (("TASK", episode.task), ("PAGES", episode.pages)),
                episode.evenly_sampled(BLOCKED_SCREENSHOTS), BLOCKED_TOKENS,
            )
        )  # fmt: skip
        if blocked.yes:
            return Finding(BLOCKED, f"blocked: {blocked.text}")
        if episode.answer is None:
            return NO_ANSWER
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
        if not episode.screenshots:
            return ()
        *earlier, last = episode.screenshots
        answers = await run_together([
            asker.ask(
                Question("relevance", "relevance", (("TASK", episode.task),), (shot,), RELEVANCE_TOKENS,
                         f"screenshot {shot.number}")
            )
            for shot in earlier
        ])  # fmt: skip
        kept = [shot for shot, answer in zip(earlier, answers, strict=True) if answer.value is not False]
        return (*kept, last)[-self._settings.max_screenshots :]


WEBJUDGE_TOKENS = 512  # of each reply, as published
MAX_NOTE_CHARS = 500


class WebJudgeProtocol(JudgeProtocol):
    """See the module."""

    name: ClassVar[str] = "webjudge"
    stages: ClassVar[Sequence[str]] = ("key_points", "relevance", "outcome")

    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        """A screenshot without a usable score is kept. Raises Undecided for the other questions, and BudgetSpent."""
        task = ("TASK", episode.task)
        listed = await asker.require(Question("key_points", "verdict", (task,), (), WEBJUDGE_TOKENS, form=KEY_POINTS))
        points = ("KEY_POINTS", str(listed.value))
        answers = await run_together([
            asker.ask(
                Question("relevance", "relevance", (task, points), (shot,), WEBJUDGE_TOKENS,
                         f"screenshot {shot.number}", SCORE)
            )
            for shot in episode.screenshots
        ])  # fmt: skip
        kept = [
            (shot, answer)
            for shot, answer in zip(episode.screenshots, answers, strict=True)
            if answer.value is None or int(answer.value) >= RELEVANT_SCORE
        ][-self._settings.max_screenshots :]
        notes = [
            f"screenshot {shot.number}: {' '.join(answer.text.split())[:MAX_NOTE_CHARS]}"
            for shot, answer in kept if answer.value is not None
        ]  # fmt: skip
        fields = [task, points, ("ACTIONS", episode.actions)]
        fields += [("ANSWER", episode.answer)] if episode.answer is not None else []
        fields += [("NOTES", "\n".join(notes))] if notes else []
        outcome = await asker.require(
            Question("outcome", "verdict", tuple(fields), tuple(shot for shot, _ in kept), WEBJUDGE_TOKENS)
        )
        return Finding("success" if outcome.yes else "failure", f"outcome: {outcome.text}")


WEBVOYAGER_TOKENS = 1_000  # of the reply, as published


class WebVoyagerProtocol(JudgeProtocol):
    """See the module."""

    name: ClassVar[str] = "webvoyager"
    stages: ClassVar[Sequence[str]] = ("outcome",)

    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        if episode.answer is None:
            return NO_ANSWER
        shots = episode.screenshots[-self._settings.max_screenshots :]
        fields = (("TASK", episode.task), ("ANSWER", episode.answer))
        outcome = await asker.require(Question("outcome", "verdict", fields, shots, WEBVOYAGER_TOKENS))
        return Finding("success" if outcome.yes else "failure", f"outcome: {outcome.text}")


PROTOCOLS: Sequence[type[JudgeProtocol]] = (RubricProtocol, WebJudgeProtocol, WebVoyagerProtocol)
