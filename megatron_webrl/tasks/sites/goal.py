"""What a task asks for, and what has become of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megatron_webrl.tasks.sites.app import App, Effect
from megatron_webrl.tasks.sites.high_level_actions import ScriptedPolicy


@dataclass(frozen=True)
class Goal:
    """A task in all its detail. Either `effects` must come about and nothing else, or `answer` must be given."""

    instruction: str
    start_path: str  # path of the first page
    make_app: Callable[[], App]  # a fresh copy of the site
    scripted_policy: ScriptedPolicy
    effects: tuple[Effect, ...] = ()
    answer: str | None = None

    def __post_init__(self) -> None:
        assert bool(self.effects) != (self.answer is not None), "a goal has effects or an answer, and not both"


@dataclass(frozen=True)
class Environment:
    """A template of tasks: goals are drawn from random numbers."""

    app_class: type[App]
    difficulty: str  # "easy", "medium" or "hard"
    make_goal: Callable[[random.Random], Goal]


def reward_and_done(goal: Goal, effects: list[Effect]) -> tuple[float | None, bool]:
    """Reward and end: 1 as soon as exactly the wanted effects are there, 0 with the first one that is not wanted.

    What an answer is worth is the judge's affair; until then there is no reward.
    """
    left = Counter(goal.effects)
    left.subtract(effects)
    if min(left.values(), default=0) < 0:
        return 0.0, True
    return (1.0, True) if goal.effects and not any(left.values()) else (None, False)


SITE_ERROR_RESULT = (math.nan, True)
"""The result of an episode whose site could not answer: no number, so that the judge masks it."""
