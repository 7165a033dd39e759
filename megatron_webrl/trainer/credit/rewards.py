"""Rewards of episodes: the outcome minus penalties. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from megatron_webrl.config.schema import Config
from megatron_webrl.types import Trajectory

RewardFunction = Callable[[Trajectory], float]


def outcome_reward(trajectory: Trajectory) -> float:
    """1 for a success, 0 for a failure."""
    return trajectory.reward


def reward_function(config: Config) -> RewardFunction:
    """r - format_penalty * F - repetition_penalty * R - length_penalty * L, all shares in 0..1.

    F  share of steps with a format error
    R  share of steps that repeat the previous action although it had left the page unchanged
    L  mean over steps of clamp((|y| - max + window) / window, 0, 1), max = max_new_tokens (arXiv 2503.14476, eq. 13)
    """
    settings, limit = config.trainer.reward, config.rollout.max_new_tokens
    if not has_penalties(config):
        return outcome_reward

    def reward(trajectory: Trajectory) -> float:
        penalty = settings.format_penalty * format_error_rate(trajectory)
        penalty += settings.repetition_penalty * repetition_rate(trajectory)
        penalty += settings.length_penalty * overlong_share(trajectory, limit, settings.length_window)
        return trajectory.reward - penalty

    return reward


def has_penalties(config: Config) -> bool:
    """Whether any penalty is configured."""
    settings = config.trainer.reward
    return any((settings.format_penalty, settings.repetition_penalty, settings.length_penalty))


def format_error_rate(trajectory: Trajectory) -> float:
    """Share of steps with a format error; 0 without steps."""
    return _share(trajectory, sum(step.format_error is not None for step in trajectory.steps))


def repetition_rate(trajectory: Trajectory) -> float:
    """Share of steps that repeat the previous step's action although it had left the page unchanged."""
    pairs = pairwise(trajectory.steps)
    return _share(
        trajectory,
        sum(after.action == before.action and after.action is not None and not before.page_changed
            for before, after in pairs),
    )  # fmt: skip


def overlong_share(trajectory: Trajectory, limit: int, window: int) -> float:
    """Mean over steps of the fraction of the last `window` tokens before `limit` that the response fills, 0..1."""
    free = limit - window
    return _share(
        trajectory, sum(min(1.0, max(0.0, (len(step.response_token_ids) - free) / window)) for step in trajectory.steps)
    )


def _share(trajectory: Trajectory, total: float) -> float:
    return total / len(trajectory.steps) if trajectory.steps else 0.0
