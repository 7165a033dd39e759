"""Rewards of episodes: the outcome minus penalties, which belong to steps. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from megatron_webrl.config.schema import Config
from megatron_webrl.types import Trajectory

RewardFunction = Callable[[Trajectory], float]


@dataclass(frozen=True)
class Penalty:
    """A configured penalty: its weight, and what it counts at each step."""

    weight: float
    shares: Callable[[Trajectory], np.ndarray]  # float64 [steps], 0..1

    def share(self, trajectory: Trajectory) -> float:
        """Mean over the steps of an episode, 0..1; 0 without steps."""
        return float(self.shares(trajectory).sum()) / len(trajectory.steps) if trajectory.steps else 0.0


def outcome_reward(trajectory: Trajectory, turn_discount: float = 1.0) -> float:
    """r * turn_discount^(T - 1) of an episode of T steps; r: 1 for a success, 0 for a failure."""
    return float(trajectory.reward * turn_discount ** max(0, len(trajectory.steps) - 1))


def reward_function(config: Config) -> RewardFunction:
    """r * turn_discount^(T - 1) - format_penalty * F - repetition_penalty * R - length_penalty * L, all shares in 0..1.

    F  share of steps with a format error
    R  share of steps that repeat the previous action although it had left the page unchanged
    L  mean over steps of clamp((|y| - max + window) / window, 0, 1), max = max_new_tokens (arXiv 2503.14476, eq. 13)
    """
    penalties, turn_discount = configured_penalties(config), config.trainer.reward.turn_discount
    if not penalties and turn_discount == 1:
        return outcome_reward
    return lambda trajectory: outcome_reward(trajectory, turn_discount) - trajectory_penalty(trajectory, penalties)


def configured_penalties(config: Config) -> list[Penalty]:
    """The penalties of trainer.reward with a weight above 0: format, repetition, length."""
    settings, limit = config.trainer.reward, config.rollout.max_new_tokens
    penalties = (
        Penalty(settings.format_penalty, format_errors),
        Penalty(settings.repetition_penalty, repetitions),
        Penalty(settings.length_penalty, partial(overlong_shares, limit=limit, window=settings.length_window)),
    )
    return [penalty for penalty in penalties if penalty.weight]


def trajectory_penalty(trajectory: Trajectory, penalties: Sequence[Penalty]) -> float:
    """Sum over penalties of weight times mean share of the steps."""
    return sum((penalty.weight * penalty.share(trajectory) for penalty in penalties), 0.0)


def step_penalties(trajectory: Trajectory, penalties: Sequence[Penalty]) -> np.ndarray:
    """Sum over penalties of weight times the step's own share, float64 [steps]; its mean is `trajectory_penalty`."""
    return sum((penalty.weight * penalty.shares(trajectory) for penalty in penalties), np.zeros(len(trajectory.steps)))


def format_errors(trajectory: Trajectory) -> np.ndarray:
    """1 for each step with a format error, float64 [steps]."""
    return np.array([float(step.format_error is not None) for step in trajectory.steps])


def repetitions(trajectory: Trajectory) -> np.ndarray:
    """1 for each step that repeats the previous action although it had left the page unchanged, float64 [steps]."""
    repeated = [
        float(after.action == before.action and after.action is not None and not before.page_changed)
        for before, after in pairwise(trajectory.steps)
    ]
    return np.array([0.0, *repeated][: len(trajectory.steps)])


def overlong_shares(trajectory: Trajectory, limit: int, window: int) -> np.ndarray:
    """Fraction of the last `window` tokens before `limit` that each response fills, float64 [steps], 0..1."""
    lengths = np.array([len(step.response_token_ids) for step in trajectory.steps], np.float64)
    return np.clip((lengths - (limit - window)) / window, 0.0, 1.0)
