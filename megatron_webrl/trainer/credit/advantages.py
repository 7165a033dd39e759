"""Credit assignment: the advantage of each step, by trainer.advantage; the overlong filter. Pure functions.

The return of an episode is an array [steps], or [1] where all of its steps have the same. In every statistic each
episode counts once, and its steps alike: long episodes do not weigh more than short ones.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_webrl.config.advantage import AnchoredConfig, GdpoConfig, GroupAdvantageConfig, OwnAdvantageConfig
from megatron_webrl.config.import_path import find_function
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.rewards import (
    Penalty,
    RewardFunction,
    configured_penalties,
    outcome_reward,
    step_penalties,
    trajectory_penalty,
)
from megatron_webrl.types import STEPS_EXHAUSTED, Group, Step, Trajectory

EPSILON = 1e-6
State = tuple[str, bytes]  # URL, digest of the screenshot
ANCHOR_DISCOUNT = 0.95  # arXiv 2505.10978
Values = list[np.ndarray]  # float64 [steps] or [1], of each trajectory of a group


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
    """all_succeeded or all_failed if all trainable trajectories share outcome and reward: no gradient; else None.

    Rewards of one outcome differ with judge.graded alone.
    """
    outcomes = {(t.outcome, t.reward) for t in group.trajectories if t.trainable}
    if len(outcomes) != 1:
        return None
    return "all_succeeded" if outcomes.pop()[0] == "success" else "all_failed"


def anchor_advantages(trajectories: Sequence[Trajectory], discount: float, divide: bool) -> list[np.ndarray]:
    """A^S of each step among the steps of the group at its state, float64 [steps] of each trajectory.

    A^S_t = (G_t - mean of G) / (population standard deviation of G + epsilon)        over all steps at the state of t
    G_t   = discount^(steps - 1 - t) * outcome                                        (arXiv 2505.10978, section 4)

    Several visits of one trajectory count as several steps. 0 at a state that only one step saw. Without `divide` the
    divisor is 1, the paper's second choice.
    """
    returns = [
        np.broadcast_to(discounted_returns(t.reward, len(t.steps), discount), len(t.steps)) for t in trajectories
    ]
    advantages = [np.zeros(len(t.steps)) for t in trajectories]
    for members in steps_by_state(trajectories).values():
        values = np.array([returns[i][t] for i, t in members])
        values = (values - values.mean()) / (values.std() + EPSILON if divide else 1.0)
        for (i, t), value in zip(members, values, strict=True):
            advantages[i][t] = value
    return advantages


def steps_by_state(trajectories: Sequence[Trajectory]) -> dict[State, list[tuple[int, int]]]:
    """Steps, as (place of the trajectory, number of the step), by the state that they acted on.

    A state is the URL with the screenshot, byte for byte. Steps without a screenshot are left out.
    """
    found: defaultdict[State, list[tuple[int, int]]] = defaultdict(list)
    for i, trajectory in enumerate(trajectories):
        digests = [hashlib.blake2b(image, digest_size=16).digest() for image in trajectory.images]
        for t, step in enumerate(trajectory.steps):
            if len(step.images):
                found[_state(step, digests)].append((i, t))
    return dict(found)


def _state(step: Step, digests: Sequence[bytes]) -> State:
    return step.url, digests[int(step.images[-1])]  # the latest image of a prompt is that of the current page


def is_overlong(trajectory: Trajectory) -> bool:
    """Whether a failure ended by the step limit, or has a response cut at rollout.max_new_tokens.

    DAPO masks the loss of such samples, since their reward says little of what they did (arXiv 2503.14476, section
    3.4). A success is never overlong: no limit kept it from its reward.
    """
    if trajectory.outcome != "failure":
        return False
    return trajectory.end_reason == STEPS_EXHAUSTED or any(step.finish_reason == "length" for step in trajectory.steps)


def step_advantages(groups: Sequence[Group], config: Config) -> list[dict[int, np.ndarray]]:
    """Advantage of each step of a batch: for each group, float64 [steps] by the index of the trajectory.

    A = A^E + anchor_weight * A^S       A^E: `summed_advantages` or `separate_advantages`, A^S: `anchor_advantages`

    Masked trajectories enter no statistic and have no entry; overlong ones, if they are masked from the loss, have no
    entry, but enter the statistics. Every rank computes the same values, because it has the groups of all ranks.
    With a step critic all are 0: advantages need its values, see `critic_credit`.
    """
    settings = config.trainer.advantage
    members = [[t for t in group.trajectories if t.trainable] for group in groups]
    turn_discount = config.trainer.reward.turn_discount
    if turn_discount != 1:
        members = [[replace(t, reward=outcome_reward(t, turn_discount)) for t in each] for each in members]
    informative = [bool(each) and common_outcome(group) is None for each, group in zip(members, groups, strict=True)]
    values: list[Values] = [[np.zeros(1) for _ in each] for each in members]
    if isinstance(settings, GroupAdvantageConfig):
        values = summed_advantages(members, informative, settings, configured_penalties(config))
    elif isinstance(settings, GdpoConfig):
        values = separate_advantages(members, informative, settings.discount, configured_penalties(config))
    elif isinstance(settings, OwnAdvantageConfig):
        values = own_advantages(members, settings)
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


def own_advantage_function(settings: OwnAdvantageConfig) -> Callable[[Sequence[Sequence[Trajectory]]], list[Values]]:
    """What trainer.advantage.name names by import path. Raises ConfigError."""
    return find_function(settings.name, "trainer.advantage.name", ("groups",), settings.options)


def own_advantages(groups: Sequence[Sequence[Trajectory]], settings: OwnAdvantageConfig) -> list[Values]:
    """Advantages by a function of the user's own, of the trainable trajectories of each group, which may have none.

    Raises ValueError for another number of them, other shapes than [steps] or [1], and values that are not finite.
    """
    found = own_advantage_function(settings)(groups)
    values = [[np.atleast_1d(np.asarray(value, np.float64)) for value in each] for each in found]
    where = f"trainer.advantage.name={settings.name} gave"
    if (given := [len(each) for each in values]) != (expected := [len(each) for each in groups]):
        raise ValueError(f"{where} advantages of {given} episodes in the groups, which have {expected}")
    for each, trajectories in zip(values, groups, strict=True):
        for value, trajectory in zip(each, trajectories, strict=True):
            if value.shape not in ((1,), (len(trajectory.steps),)) or not np.isfinite(value).all():
                shape = list(value.shape) if np.isfinite(value).all() else "not finite numbers"
                raise ValueError(f"{where} {shape} for an episode of {len(trajectory.steps)} steps")
    return values


def summed_advantages(
    groups: Sequence[Sequence[Trajectory]],
    informative: Sequence[bool],
    settings: GroupAdvantageConfig,
    penalties: Sequence[Penalty],
) -> list[Values]:
    """Advantages from outcome and penalties together, of the trainable trajectories of each group.

    A_t = (G_t - b) / d               G_t = discount^(steps - 1 - t) * outcome - P, P: mean penalty of the steps
    A_t = (G_t - b) / d - p_t / d     with penalties=step: G_t without P, p_t: penalty of step t alone

    b: `subtract_baseline`. d: the group's deviation (GRPO, arXiv 2402.03300), 1 (Dr. GRPO, arXiv 2503.20783), the
    deviation of G_t - b over the batch (REINFORCE++, arXiv 2501.03262), or the group's mean of the outcomes in G_t,
    without P, which could make it negative (MaxRL, arXiv 2602.02710); epsilon is added to all but 1.
    All 0 in a group that is not `informative`, one of a single outcome; it is not in the batch's deviation either.
    """
    by_step = settings.penalties == "step"
    outcomes: list[Values] = [
        [discounted_returns(t.reward, len(t.steps), settings.discount) for t in trajectories] for trajectories in groups
    ]
    returns = [
        [
            outcome - (0.0 if by_step else trajectory_penalty(t, penalties))
            for t, outcome in zip(trajectories, each, strict=True)
        ]
        for trajectories, each in zip(groups, outcomes, strict=True)
    ]
    centred = [subtract_baseline(each, settings.baseline) if each else [] for each in returns]
    batch = [value for each, counts in zip(centred, informative, strict=True) if counts for value in each]
    batch_deviation = deviation(batch, centre=0.0) if batch else 0.0

    def scaled(number: int) -> Values:
        if not informative[number]:
            return [np.zeros(1) for _ in groups[number]]
        divisor = {
            "none": 1.0, "batch_std": batch_deviation + EPSILON, "group_std": deviation(returns[number]) + EPSILON,
            "group_mean": float(np.mean([each.mean() for each in outcomes[number]])) + EPSILON,
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
