"""Statistics of a group and the advantages that they give. Pure functions.

The return of an episode is an array [steps], or [1] where all of its steps have the same. In every statistic each
episode counts once, and its steps alike: long episodes do not weigh more than short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_webrl.trainer.credit.rewards import RewardFunction, outcome_reward
from megatron_webrl.types import Group

EPSILON = 1e-6


def discounted_returns(reward: float, steps: int, discount: float) -> np.ndarray:
    """G_t = discount^(steps - 1 - t) * reward, float64 [steps]; [1] with discount 1.

    The return of step t of an episode whose only reward follows its last step (arXiv 2505.10978, section 4).
    """
    return reward * discount ** np.arange(0.0 if discount == 1 else steps - 1.0, -1.0, -1.0)


def subtract_baseline(returns: Sequence[np.ndarray], baseline: str) -> list[np.ndarray]:
    """Returns of a group less their baseline, float64 [steps] or [1] of each of N episodes.

    group_mean       b   = mean of m_1 ... m_N                  m_i: mean return of the steps of episode i
    leave_one_out    b_i = mean of all m_j with j != i          RLOO, arXiv 2402.14740: without bias
    """
    means = np.array([each.mean() for each in returns])
    if baseline == "leave_one_out" and len(returns) > 1:
        baselines = (means.sum() - means) / (len(returns) - 1)
    else:
        baselines = np.full(len(returns), means.mean())
    return [each - value for each, value in zip(returns, baselines, strict=True)]


def deviation(returns: Sequence[np.ndarray], centre: float | None = None) -> float:
    """Population standard deviation of the episodes' returns, each episode with the same weight; about `centre`, if
    given, else about their mean.
    """
    middle = np.mean([each.mean() for each in returns]) if centre is None else centre
    return float(np.sqrt(np.mean([((each - middle) ** 2).mean() for each in returns])))


def normalize(returns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(G - mean) / (population standard deviation + epsilon) within a group or a batch (GRPO, arXiv 2402.03300)."""
    divisor = deviation(returns) + EPSILON
    return [each / divisor for each in subtract_baseline(returns, "group_mean")]


def group_advantages(group: Group, reward: RewardFunction = outcome_reward) -> dict[int, float]:
    """GRPO's advantage of each trainable trajectory by its index; masked ones enter neither mean nor deviation.

    All 0 in a group of one outcome: where penalties alone differ, the division would make the smallest of them as large
    as the difference between a success and a failure.
    """
    trainable = [t for t in group.trajectories if t.trainable]
    if not trainable or common_outcome(group):
        return {t.index: 0.0 for t in trainable}
    values = normalize([np.array([reward(t)]) for t in trainable])
    return {t.index: float(value[0]) for t, value in zip(trainable, values, strict=True)}


def common_outcome(group: Group) -> str | None:
    """all_succeeded or all_failed if all trainable trajectories share an outcome: no gradient; else None."""
    outcomes = {t.outcome for t in group.trajectories if t.trainable}
    if len(outcomes) != 1:
        return None
    return "all_succeeded" if outcomes == {"success"} else "all_failed"
