"""Statistics of a group and the advantages that they give; anchor states; the overlong filter. Pure functions.

The return of an episode is an array [steps], or [1] where all of its steps have the same. In every statistic each
episode counts once, and its steps alike: long episodes do not weigh more than short ones.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_webrl.trainer.credit.rewards import RewardFunction, outcome_reward
from megatron_webrl.types import STEPS_EXHAUSTED, Group, Step, Trajectory

EPSILON = 1e-6
State = tuple[str, bytes]  # URL, digest of the screenshot


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
