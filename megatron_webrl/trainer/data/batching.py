"""Training samples of groups, their advantages and token weights, and minibatches. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_webrl.config.loss import ReplayConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.advantages import group_advantages, step_advantages
from megatron_webrl.types import Group, Trajectory

StepId = tuple[int, int, int]  # ticket, index of the trajectory, number of the step
NO_VERSION = -1  # of tokens whose behaviour log-probabilities no current version can reproduce: not compared


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
    advantage: float  # of this step
    trajectory_steps: int  # steps of the trajectory
    trajectory_id: tuple[int, int]  # ticket, index
    succeeded: bool = False  # whether the episode is a success
    step: int = 0  # number of the step in its trajectory
    teacher_logprobs: np.ndarray | None = None  # float32 [response], NaN for tokens without one; None: no teacher
    experts: np.ndarray | None = None  # of a mixture of experts, as in types.Step; None: none recorded

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    @property
    def step_id(self) -> StepId:
        """Ticket, index of the trajectory, number of the step."""
        return (*self.trajectory_id, self.step)


def training_samples(groups: Sequence[Group], config: Config, version: int) -> list[TrainingSample]:
    """Samples of the update from policy `version`, with the advantages of the configured loss and credit assignment.

    Those of a teacher depend on the policy at the start of the update: the loss adds them.
    """
    loss = config.trainer.loss
    if isinstance(loss, ReplayConfig):  # shuffle_advantages is handled by shuffled_rewards()
        samples = make_samples(groups, success_advantages)
        return acting_samples(samples, groups) if loss.unchanged_pages == "skip" else samples
    if config.trainer.distillation.alone:
        return make_samples(groups, lambda group: dict.fromkeys(demonstration_advantages(group), 0.0))
    samples = _samples(groups, step_advantages(groups, config))
    if loss.shuffle_advantages:
        return shuffled_advantages(samples, f"advantages/{config.run.seed}/{version}")
    return samples


def make_samples(
    groups: Sequence[Group], advantages: Callable[[Group], dict[int, float]] = group_advantages
) -> list[TrainingSample]:
    """Samples of all trajectories that have an advantage, which all their steps share, in the order of groups."""
    return _samples(groups, [advantages(group) for group in groups])


def _samples(groups: Sequence[Group], advantages: Sequence[Mapping[int, float | np.ndarray]]) -> list[TrainingSample]:
    """Samples in the order of groups and steps; `advantages`: of each group, by index, one or float64 [steps]."""
    return [
        _sample(trajectory, number, advantage)
        for group, values in zip(groups, advantages, strict=True)
        for trajectory in group.trajectories
        if trajectory.index in values
        for number, advantage in enumerate(_per_step(values[trajectory.index], trajectory))
        if len(trajectory.steps[number].response_token_ids)
    ]


def _per_step(advantage: float | np.ndarray, trajectory: Trajectory) -> list[float]:
    return np.broadcast_to(np.asarray(advantage, np.float64), len(trajectory.steps)).tolist()


def success_advantages(group: Group) -> dict[int, float]:
    """Advantage 1 for each trainable success, none for other trajectories (RAFT)."""
    return {t.index: 1.0 for t in group.trajectories if t.is_trainable_success}


def acting_samples(samples: Sequence[TrainingSample], groups: Sequence[Group]) -> list[TrainingSample]:
    """Samples of the steps that changed their page, and of the last step of each episode, which ended it: an answer
    changes no page. |tau| counts all steps.
    """
    steps = {(t.ticket, t.index): t.steps for group in groups for t in group.trajectories}
    return [
        sample
        for sample in samples
        if sample.step == sample.trajectory_steps - 1 or steps[sample.trajectory_id][sample.step].page_changed
    ]


def demonstration_advantages(group: Group) -> dict[int, float]:
    """Advantage 1 for each trainable trajectory, whatever its outcome (warm start)."""
    return {t.index: 1.0 for t in group.trajectories if t.trainable}


def _sample(trajectory: Trajectory, number: int, advantage: float) -> TrainingSample:
    step = trajectory.steps[number]
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
        succeeded=trajectory.outcome == "success",
        step=number,
        teacher_logprobs=step.teacher_logprobs if step.teacher_logprobs.size else None,
        experts=step.experts if step.experts.size else None,
    )


def shuffled_advantages(samples: Sequence[TrainingSample], seed: str) -> list[TrainingSample]:
    """Permute the advantages of whole trajectories at random: a control that cannot learn.

    The steps of a trajectory get those of another one, in their order: step t of T the one at floor(t * T' / T) of T'.
    """
    advantages: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        advantages.setdefault(sample.trajectory_id, []).append(sample.advantage)
    keys = sorted(advantages)
    permuted = random.Random(seed).sample([advantages[key] for key in keys], len(keys))
    given = {}
    for key, other in zip(keys, permuted, strict=True):
        steps = len(advantages[key])
        given[key] = iter([other[number * len(other) // steps] for number in range(steps)])
    return [replace(sample, advantage=next(given[sample.trajectory_id])) for sample in samples]


def shuffled_rewards(groups: Sequence[Group], config: Config, version: int) -> list[Group]:
    """Permute the rewards among trainable episodes with RAFT and shuffle_advantages; else the groups unchanged."""
    loss = config.trainer.loss
    if not loss.imitates_successes or not loss.shuffle_advantages:
        return list(groups)
    rewards = [t.reward for group in groups for t in group.trajectories if t.trainable]
    random.Random(f"rewards/{config.run.seed}/{version}").shuffle(rewards)
    permuted = iter(rewards)

    def with_permuted_reward(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, reward=next(permuted)) if trajectory.trainable else trajectory

    return [replace(group, trajectories=tuple(map(with_permuted_reward, group.trajectories))) for group in groups]


def clear_versions_before_restart(groups: Sequence[Group], restart_epoch: int) -> list[Group]:
    """Set the token versions of episodes from an earlier restart epoch to NO_VERSION.

    A version made after the checkpoint had other weights than the version that has its number after the restart.
    """

    def cleared(trajectory: Trajectory) -> Trajectory:
        if trajectory.restart_epoch == restart_epoch:
            return trajectory
        steps = [replace(step, versions=np.full_like(step.versions, NO_VERSION)) for step in trajectory.steps]
        return replace(trajectory, steps=tuple(steps))

    return [replace(group, trajectories=tuple(map(cleared, group.trajectories))) for group in groups]


def token_weight(normalizer: str, trajectories: int, tokens: int, steps: int, constant_steps: int) -> float:
    """Weight of each token of a trajectory with |tau| = `steps`, one of N = `trajectories` with together `tokens`
    response tokens in the minibatch, on all data-parallel ranks; k = `constant_steps`.

    per_trajectory              1 / (N |tau|)       multi-step GRPO
    constant                    1 / (N k)           AsyncWebRL (arXiv 2606.05597): failures, being longer, are not
                                                    under-weighted
    token_mean                  1 / tokens          mean over all tokens of the minibatch
    async_webrl_constant        1 / (k tokens)      AsyncWebRL's released code: advantages A / k, then token_mean
    async_webrl_per_trajectory  1 / (|tau| tokens)  the same code with A / |tau|

    Raises ValueError for another name.
    """
    weights = {
        "constant": 1.0 / (trajectories * constant_steps),
        "per_trajectory": 1.0 / (trajectories * steps),
        "token_mean": 1.0 / tokens,
        "async_webrl_constant": 1.0 / (constant_steps * tokens),
        "async_webrl_per_trajectory": 1.0 / (steps * tokens),
    }
    if normalizer not in weights:
        raise ValueError(f"normalizer {normalizer!r} is not one of {', '.join(weights)}")
    return weights[normalizer]


def token_weights(samples: Sequence[TrainingSample], normalizer: str, constant_steps: int) -> list[float]:
    """The token weight of each sample, given all samples of the minibatch."""
    trajectories, tokens = len({s.trajectory_id for s in samples}), sum(len(s.response) for s in samples)
    return [token_weight(normalizer, trajectories, tokens, s.trajectory_steps, constant_steps) for s in samples]


def minibatches(
    samples: Sequence[TrainingSample], count: int, seed: int, whole_groups: bool = True
) -> list[list[TrainingSample]]:
    """Split into at most `count` minibatches in an order drawn from `seed`.

    They have whole groups, whose advantages add up to 0, or whole trajectories.
    """

    def key(sample: TrainingSample) -> tuple[int, ...]:
        return sample.trajectory_id[: 1 if whole_groups else 2]

    keys = sorted({key(s) for s in samples})
    random.Random(seed).shuffle(keys)
    parts = [set(keys[i::count]) for i in range(min(count, len(keys)))]
    return [[s for s in samples if key(s) in part] for part in parts]
