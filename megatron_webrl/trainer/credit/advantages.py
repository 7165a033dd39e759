"""Group-normalised advantages (GRPO). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_webrl.trainer.credit.rewards import RewardFunction, outcome_reward
from megatron_webrl.types import Group

EPSILON = 1e-6


def normalize_rewards(rewards: Sequence[float]) -> np.ndarray:
    """(r - mean) / (population std + epsilon), float64 [episodes of a group without masked ones] (arXiv 2402.03300)."""
    values = np.asarray(rewards, dtype=np.float64)
    return (values - values.mean()) / (values.std() + EPSILON)


def group_advantages(group: Group, reward: RewardFunction = outcome_reward) -> dict[int, float]:
    """Advantage of each trainable trajectory by its index; masked ones enter neither mean nor deviation.

    All 0 in a group of one outcome: where penalties alone differ, the division would make the smallest of them as large
    as the difference between a success and a failure.
    """
    trainable = [t for t in group.trajectories if t.trainable]
    if not trainable or common_outcome(group):
        return {t.index: 0.0 for t in trainable}
    values = normalize_rewards([reward(t) for t in trainable])
    return {t.index: float(value) for t, value in zip(trainable, values, strict=True)}


def common_outcome(group: Group) -> str | None:
    """all_succeeded or all_failed if all trainable trajectories share an outcome: no gradient; else None."""
    outcomes = {t.outcome for t in group.trajectories if t.trainable}
    if len(outcomes) != 1:
        return None
    return "all_succeeded" if outcomes == {"success"} else "all_failed"
