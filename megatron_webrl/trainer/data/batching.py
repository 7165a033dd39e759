"""From groups to samples, their weights and minibatches. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.advantages import group_advantages
from megatron_webrl.trainer.loss import MinibatchTotals, token_weight
from megatron_webrl.trainer.rewards import reward_function
from megatron_webrl.types import Group, Step, Trajectory

NO_VERSION = -1
"""Of tokens whose log-probabilities are no other version's: nothing is to be compared with them."""


@dataclass(frozen=True)
class TrainingSample:
    """One step as a training sample, with its own windowed context."""

    prompt: np.ndarray  # int32 [prompt]
    response: np.ndarray  # int32 [response]
    behaviour_logprobs: np.ndarray  # float32 [response], log-probabilities that the engine reported
    versions: np.ndarray  # int32 [response]
    images: tuple[bytes, ...]  # encoded screenshots, in prompt order
    grids: np.ndarray  # int32 [images, 3]
    temperature: float
    advantage: float
    trajectory_steps: int  # steps of the trajectory
    trajectory_id: tuple[int, int]  # ticket, index

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


def training_samples(groups: Sequence[Group], config: Config, version: int) -> list[TrainingSample]:
    """The samples of an update from policy `version` on, with the advantages that the configured loss wants."""
    loss = config.trainer.loss
    if loss.name == "raft":  # where relabelled() shuffles
        return make_samples(groups, success_advantages, page_changing_steps if loss.raft_drop_unchanged else all_steps)
    samples = make_samples(groups, partial(group_advantages, reward=reward_function(config)))
    return (
        shuffled_advantages(samples, f"advantages/{config.run.seed}/{version}") if loss.shuffle_advantages else samples
    )


def all_steps(trajectory: Trajectory) -> Sequence[Step]:
    """Every step."""
    return trajectory.steps


def page_changing_steps(trajectory: Trajectory) -> Sequence[Step]:
    """The steps that changed the page, and the last one: it ended the episode, whatever it left to be seen."""
    return [step for step in trajectory.steps[:-1] if step.page_changed] + list(trajectory.steps[-1:])


def make_samples(
    groups: Sequence[Group],
    advantages: Callable[[Group], dict[int, float]] = group_advantages,
    steps: Callable[[Trajectory], Sequence[Step]] = all_steps,
) -> list[TrainingSample]:
    """The samples of all trainable trajectories that have an advantage, in the order of groups and steps."""
    return [
        _sample(trajectory, step, values[trajectory.index])
        for group in groups
        for values in [advantages(group)]
        for trajectory in group.trajectories
        if trajectory.index in values
        for step in steps(trajectory)
        if len(step.response_token_ids)
    ]


def success_advantages(group: Group) -> dict[int, float]:
    """Advantage 1 for every success and none for the rest: what RAFT trains on."""
    return {t.index: 1.0 for t in group.trajectories if t.trainable and t.reward > 0}


def demonstration_advantages(group: Group) -> dict[int, float]:
    """Advantage 1 for every trainable trajectory, whatever came of it: what a warm start trains on."""
    return {t.index: 1.0 for t in group.trajectories if t.trainable}


def _sample(trajectory: Trajectory, step: Step, advantage: float) -> TrainingSample:
    return TrainingSample(
        prompt=step.prompt_token_ids,
        response=step.response_token_ids,
        behaviour_logprobs=step.logprobs,
        versions=step.versions,
        images=tuple(trajectory.images[i] for i in step.images),
        grids=step.image_grids,
        temperature=trajectory.temperature,
        advantage=advantage,
        trajectory_steps=len(trajectory.steps),
        trajectory_id=(trajectory.ticket, trajectory.index),
    )


def shuffled_advantages(samples: Sequence[TrainingSample], seed: str) -> list[TrainingSample]:
    """The samples with their trajectories' advantages dealt out anew at random: a control that cannot learn."""
    advantages = {sample.trajectory_id: sample.advantage for sample in samples}
    keys = sorted(advantages)
    dealt = random.Random(seed).sample([advantages[key] for key in keys], len(keys))
    given = dict(zip(keys, dealt, strict=True))
    return [replace(sample, advantage=given[sample.trajectory_id]) for sample in samples]


def shuffled_rewards(groups: Sequence[Group], config: Config, version: int) -> list[Group]:
    """The groups as RAFT is to take them: with shuffle_advantages, all rewards dealt out anew among the episodes."""
    loss = config.trainer.loss
    if loss.name != "raft" or not loss.shuffle_advantages:
        return list(groups)
    rewards = [t.reward for group in groups for t in group.trajectories if t.trainable]
    random.Random(f"rewards/{config.run.seed}/{version}").shuffle(rewards)
    dealt = iter(rewards)

    def given(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, reward=next(dealt)) if trajectory.trainable else trajectory

    return [replace(group, trajectories=tuple(map(given, group.trajectories))) for group in groups]


def clear_versions_before_restart(groups: Sequence[Group], incarnation: int) -> list[Group]:
    """The groups, their tokens without a version (NO_VERSION) where an earlier incarnation began the episode.

    A version that was made after the checkpoint is of other weights than the one that has its number now.
    """

    def known(trajectory: Trajectory) -> Trajectory:
        if trajectory.restart_epoch == incarnation:
            return trajectory
        steps = [replace(step, versions=np.full_like(step.versions, NO_VERSION)) for step in trajectory.steps]
        return replace(trajectory, steps=tuple(steps))

    return [replace(group, trajectories=tuple(map(known, group.trajectories))) for group in groups]


def minibatch_totals(samples: Sequence[TrainingSample]) -> MinibatchTotals:
    """Totals that the normalisers divide by."""
    return MinibatchTotals(
        trajectories=len({s.trajectory_id for s in samples}), tokens=sum(len(s.response) for s in samples)
    )


def token_weights(samples: Sequence[TrainingSample], normaliser: str, k: int) -> list[float]:
    """The token weight of each sample, given all samples of the minibatch."""
    size = minibatch_totals(samples)
    return [token_weight(normaliser, size, s.trajectory_steps, k) for s in samples]


def minibatches(samples: Sequence[TrainingSample], count: int, seed: int) -> list[list[TrainingSample]]:
    """Split into at most `count` minibatches of whole trajectories, in an order drawn from `seed`."""
    keys = sorted({s.trajectory_id for s in samples})
    random.Random(seed).shuffle(keys)
    parts = [set(keys[i::count]) for i in range(min(count, len(keys)))]
    return [[s for s in samples if s.trajectory_id in part] for part in parts]
