"""WebVoyager's protocol (arXiv 2401.13919): one question about task, answer and the last screenshots.

Their evaluation shows the last k screenshots, and counts an episode without an answer as a failure. k is
judge.max_screenshots here; published results use 15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.judge.episode_view import EpisodeView
from megatron_webrl.judge.protocols.base import Finding, no_answer
from megatron_webrl.judge.questions import Asker, Question

MAX_TOKENS = 1_000  # of the reply, as published


class WebVoyagerProtocol:
    """See the module."""

    name: ClassVar[str] = "webvoyager"
    stages: ClassVar[Sequence[str]] = ("outcome",)

    def __init__(self, settings: JudgeConfig) -> None:
        self._settings = settings

    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        """Raises Undecided without a usable answer, and BudgetSpent."""
        if episode.answer is None:
            return no_answer()
        shots = episode.screenshots[-self._settings.max_screenshots :]
        fields = (("TASK", episode.task), ("ANSWER", episode.answer))
        outcome = await asker.require(Question("outcome", "verdict", fields, shots, MAX_TOKENS))
        return Finding("success" if outcome.yes else "failure", f"outcome: {outcome.text}")
