"""Credit assignment of an update: the advantage of each step, by trainer.advantage. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_webrl.config.advantage import AnchoredConfig, GdpoConfig, GroupAdvantageConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.advantages import (
    EPSILON,
    anchor_advantages,
    common_outcome,
    deviation,
    discounted_returns,
    is_overlong,
    normalize,
    subtract_baseline,
)
from megatron_webrl.trainer.credit.rewards import Penalty, configured_penalties, step_penalties, trajectory_penalty
from megatron_webrl.types import Group, Trajectory

ANCHOR_DISCOUNT = 0.95  # arXiv 2505.10978
Values = list[np.ndarray]  # float64 [steps] or [1], of each trajectory of a group


def step_advantages(groups: Sequence[Group], config: Config) -> list[dict[int, np.ndarray]]:
    """Advantage of each step of a batch: for each group, float64 [steps] by the index of the trajectory.

    A = A^E + anchor_weight * A^S       A^E: `summed_advantages` or `separate_advantages`, A^S: `anchor_advantages`

    Masked trajectories enter no statistic and have no entry; overlong ones, if they are masked from the loss, have no
    entry, but enter the statistics. Every rank computes the same values, because it has the groups of all ranks.
    With a step critic all are 0: advantages need its values, see `critic_credit`.
    """
    settings = config.trainer.advantage
    members = [[t for t in group.trajectories if t.trainable] for group in groups]
    informative = [bool(each) and common_outcome(group) is None for each, group in zip(members, groups, strict=True)]
    values: list[Values] = [[np.zeros(1) for _ in each] for each in members]
    if isinstance(settings, GroupAdvantageConfig):
        values = summed_advantages(members, informative, settings, configured_penalties(config))
    elif isinstance(settings, GdpoConfig):
        values = separate_advantages(members, informative, settings.discount, configured_penalties(config))
    if isinstance(settings, AnchoredConfig) and settings.anchor_weight:
        divide = not isinstance(settings, GroupAdvantageConfig) or settings.scale == "group_std"
        for number in np.flatnonzero(informative):
            anchors = anchor_advantages(members[number], ANCHOR_DISCOUNT, divide)
            values[number] = [a + settings.anchor_weight * b for a, b in zip(values[number], anchors, strict=True)]
    masks = settings.overlong == "mask"
    return [
        {
            t.index: np.broadcast_to(value, len(t.steps))
            for t, value in zip(trajectories, found, strict=True)
            if not (masks and is_overlong(t))
        }
        for trajectories, found in zip(members, values, strict=True)
    ]


def summed_advantages(
    groups: Sequence[Sequence[Trajectory]],
    informative: Sequence[bool],
    settings: GroupAdvantageConfig,
    penalties: Sequence[Penalty],
) -> list[Values]:
    """Advantages from outcome and penalties together, of the trainable trajectories of each group.

    A_t = (G_t - b) / d               G_t = discount^(steps - 1 - t) * outcome - P, P: mean penalty of the steps
    A_t = (G_t - b) / d - p_t / d     with penalties=step: G_t without P, p_t: penalty of step t alone

    b: `subtract_baseline`. d: the group's deviation (GRPO, arXiv 2402.03300), 1 (Dr. GRPO, arXiv 2503.20783), or the
    deviation of G_t - b over the batch (REINFORCE++, arXiv 2501.03262); epsilon is added to a deviation.
    All 0 in a group that is not `informative`, one of a single outcome; it is not in the batch's deviation either.
    """
    by_step = settings.penalties == "step"
    returns: list[Values] = [
        [
            discounted_returns(t.reward, len(t.steps), settings.discount)
            - (0.0 if by_step else trajectory_penalty(t, penalties))
            for t in trajectories
        ]
        for trajectories in groups
    ]
    centred = [subtract_baseline(each, settings.baseline) if each else [] for each in returns]
    batch = [value for each, counts in zip(centred, informative, strict=True) if counts for value in each]
    batch_deviation = deviation(batch, centre=0.0) if batch else 0.0

    def scaled(number: int) -> Values:
        if not informative[number]:
            return [np.zeros(1) for _ in groups[number]]
        divisor = {
            "none": 1.0, "batch_std": batch_deviation + EPSILON, "group_std": deviation(returns[number]) + EPSILON
        }[settings.scale]  # fmt: skip
        if not by_step:
            return [value / divisor for value in centred[number]]
        return [
            (value - step_penalties(t, penalties)) / divisor
            for t, value in zip(groups[number], centred[number], strict=True)
        ]

    return [scaled(number) for number in range(len(groups))]


def separate_advantages(
    groups: Sequence[Sequence[Trajectory]], informative: Sequence[bool], discount: float, penalties: Sequence[Penalty]
) -> list[Values]:
    """Advantages from outcome and penalties separately (GDPO, arXiv 2601.05242), of the trajectories of each group.

    S = normalise(G) + sum over penalties k of weight_k * normalise(- share_k)      within the group
    A = (S - mean) / (standard deviation + epsilon)    over the batch; A = S if none of its groups is `informative`

    G: discounted outcome of each step. A weight says how much a penalty counts against the outcome, whatever the
    spread of either. In a group that is not `informative`, one of a single outcome, normalise(G) is 0, and the
    penalties alone count, as in the paper. In a batch of such groups alone the division would cancel their weights.
    """
    summed: list[Values] = []
    for trajectories, counts in zip(groups, informative, strict=True):
        values: Values = [np.zeros(1) for _ in trajectories]
        if counts:
            values = normalize([discounted_returns(t.reward, len(t.steps), discount) for t in trajectories])
        for penalty in penalties if trajectories else ():
            shares = normalize([np.array([-penalty.share(t)]) for t in trajectories])
            values = [a + penalty.weight * b for a, b in zip(values, shares, strict=True)]
        summed.append(values)
    if not any(informative):
        return summed
    normalized = iter(normalize([value for values in summed for value in values]))
    return [[next(normalized) for _ in values] for values in summed]
