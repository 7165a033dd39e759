"""WebJudge, the protocol of Online-Mind2Web (arXiv 2504.01382): key points, a score for each screenshot, outcome.

The key points of the task are listed first. Each screenshot gets a score from 1 to 5; those with at least 3 are shown
to the last question, with the notes that were made of them. An episode without an answer can be a success, since many
of its tasks ask for an effect only. Websites that block the agent are not told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.judge.episode_view import EpisodeView
from megatron_webrl.judge.protocols.base import Finding
from megatron_webrl.judge.questions import RELEVANT_SCORE, Asker, Question, ask_all
from megatron_webrl.judge.replies import KEY_POINTS, SCORE

MAX_TOKENS = 512  # of each reply, as published
MAX_NOTE_CHARS = 500


class WebJudgeProtocol:
    """See the module."""

    name: ClassVar[str] = "webjudge"
    stages: ClassVar[Sequence[str]] = ("key_points", "relevance", "outcome")

    def __init__(self, settings: JudgeConfig) -> None:
        self._settings = settings

    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        """A screenshot without a usable score is kept. Raises Undecided for the other questions, and BudgetSpent."""
        task = ("TASK", episode.task)
        listed = await asker.require(Question("key_points", "verdict", (task,), (), MAX_TOKENS, form=KEY_POINTS))
        points = ("KEY_POINTS", str(listed.value))
        answers = await ask_all([
            asker.ask(
                Question("relevance", "relevance", (task, points), (shot,), MAX_TOKENS, f"screenshot {shot.number}",
                         SCORE)
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
            Question("outcome", "verdict", tuple(fields), tuple(shot for shot, _ in kept), MAX_TOKENS)
        )
        return Finding("success" if outcome.yes else "failure", f"outcome: {outcome.text}")
