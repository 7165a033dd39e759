"""What protocols share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.judge.episode_view import EpisodeView
from megatron_webrl.judge.questions import Asker


@dataclass(frozen=True)
class Finding:
    """The outcome of a protocol."""

    outcome: str  # "success", "failure" or types.BLOCKED
    reason: str


class JudgeProtocol(Protocol):
    """The questions of a verdict, in order, and what follows from the answers."""

    name: ClassVar[str]
    stages: ClassVar[Sequence[str]]  # prompt files that it needs

    def __init__(self, settings: JudgeConfig) -> None: ...

    async def judge(self, episode: EpisodeView, asker: Asker) -> Finding:
        """Judge an episode with a regular end. Raises Undecided without a usable answer, and BudgetSpent."""
        ...


def no_answer() -> Finding:
    return Finding("failure", "the agent gave no answer")
