"""Anchor states (GiGPO, arXiv 2505.10978): steps of a group at the same state are compared with one another."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_webrl.trainer.credit.advantages import EPSILON, discounted_returns
from megatron_webrl.types import Step, Trajectory

State = tuple[str, bytes]  # URL, digest of the screenshot


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
