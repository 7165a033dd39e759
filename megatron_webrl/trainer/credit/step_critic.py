"""Credit from a step critic: advantages and value targets from the predicted return of each step.

Pure functions, but for `assign_credit`, which gathers the values of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.config.schema import Config
from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.trainer.credit.advantages import EPSILON, deviation
from megatron_webrl.trainer.credit.rewards import (
    configured_penalties,
    outcome_reward,
    step_penalties,
    trajectory_penalty,
)
from megatron_webrl.trainer.data.batching import StepId
from megatron_webrl.trainer.data.sequence_packer import Microbatch
from megatron_webrl.trainer.parallel import broadcast_from_last_stage
from megatron_webrl.types import Group

Minibatches = list[list[Microbatch]]


@dataclass(frozen=True)
class StepCredit:
    """What the critic's values make of the steps of a batch."""

    advantages: dict[StepId, float]
    targets: dict[StepId, float]  # what the value of each step is trained to predict
    metrics: dict[str, float]  # value_mean, explained_variance


def generalized_advantages(rewards: np.ndarray, values: np.ndarray, discount: float, gae_lambda: float) -> np.ndarray:
    """Generalised advantage estimates of the steps of an episode, float64 [steps] (arXiv 1506.02438, eq. 16).

    A_t = delta_t + discount * gae_lambda * A_{t+1}
    delta_t = r_t + discount * V_{t+1} - V_t              A and V are 0 after the last step

    `rewards`, `values`: [steps]. A step is an action of the agent, not a token (ArCHer, arXiv 2402.19446).
    """
    advantages = np.zeros(len(values))
    next_advantage = next_value = 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + discount * next_value - values[t]
        advantages[t] = next_advantage = delta + discount * gae_lambda * next_advantage
        next_value = values[t]
    return advantages


def critic_credit(groups: Sequence[Group], values: Mapping[StepId, float], config: Config) -> StepCredit:
    """Advantages and value targets of the steps that have a value; the other steps are passed over.

    A_t = GAE_t / d               r = outcome - P after the last step, else 0; P: mean penalty of the steps
    A_t = (GAE_t - p_t) / d       with penalties=step: r without P, p_t: penalty of step t alone
    target_t = GAE_t + V_t        the lambda-return

    d: 1, or with scale=batch_std the root mean square of the numerator over the batch + epsilon, where each episode
    counts once and its steps alike. No statistic of a group is used, so groups of one outcome have a gradient too.
    """
    settings, penalties = config.trainer.critic, configured_penalties(config)
    assert settings is not None, "trainer.advantage.name is critic"
    numerators: dict[tuple[StepId, ...], np.ndarray] = {}
    targets: dict[StepId, float] = {}
    returns: list[np.ndarray] = []
    for trajectory in (t for group in groups for t in group.trajectories):
        ids = tuple((trajectory.ticket, trajectory.index, number) for number in range(len(trajectory.steps)))
        ids = tuple(each for each in ids if each in values)
        if not ids:
            continue
        by_step = settings.penalties == "step"
        predicted, rewards = np.array([values[each] for each in ids]), np.zeros(len(ids))
        rewards[-1] = outcome_reward(trajectory, config.trainer.reward.turn_discount) - (
            0.0 if by_step else trajectory_penalty(trajectory, penalties)
        )
        advantages = generalized_advantages(rewards, predicted, settings.discount, settings.gae_lambda)
        targets |= zip(ids, (advantages + predicted).tolist(), strict=True)
        returns.append(generalized_advantages(rewards, np.zeros(len(ids)), settings.discount, 1.0))
        own = step_penalties(trajectory, penalties)[[number for _, _, number in ids]] if by_step else 0.0
        numerators[ids] = advantages - own
    scales = settings.scale == "batch_std" and numerators
    divisor = deviation([*numerators.values()], centre=0.0) + EPSILON if scales else 1.0
    found = {i: a for ids, each in numerators.items() for i, a in zip(ids, (each / divisor).tolist(), strict=True)}
    predicted = np.array([values[each] for each in found])
    return StepCredit(found, targets, _metrics(predicted, np.concatenate([*returns, np.zeros(0)])))


def _metrics(predicted: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Over the steps, each with the same weight: mean value, and 1 - Var(G - V) / Var(G) where returns G differ."""
    metrics = {"value_mean": float(predicted.mean())} if len(predicted) else {}
    if len(returns) and (variance := float(returns.var())) > EPSILON**2:
        metrics["explained_variance"] = 1.0 - float((returns - predicted).var()) / variance
    return metrics


def assign_credit(
    minibatches: Minibatches, values: Sequence[Sequence[Tensor]], groups: Sequence[Group], config: Config
) -> tuple[Minibatches, dict[str, float]]:
    """Micro-batches with the advantages and value targets of `critic_credit`, and its metrics. Collective.

    `values`: of the policy at the start of the update, float32 [values] per micro-batch, on the last pipeline stage.
    """
    microbatches = [each for part in minibatches for each in part]
    found = gather_values(microbatches, [each for part in values for each in part])
    credit = critic_credit(groups, found, config)
    return [[_with_credit(each, credit) for each in part] for part in minibatches], credit.metrics


def gather_values(microbatches: Sequence[Microbatch], values: Sequence[Tensor]) -> dict[StepId, float]:
    """The value of each step of all replicas, on every rank. Padding micro-batches count nothing. Collective."""
    found: dict[StepId, float] = {}
    if is_last_stage():
        columns = [
            (batch.step_index[batch.inputs.value_rows], of_batch, batch.value_weight)
            for batch, of_batch in zip(microbatches, values, strict=True)
        ]
        # One read for all micro-batches: the host waits for the device. float64 holds indices and float32 exactly.
        rows = torch.cat([torch.stack([column.double() for column in each], dim=1) for each in columns]).cpu()
        local: dict[StepId, float] = {}
        for batch, part in zip(microbatches, rows.split([len(of_batch) for of_batch in values]), strict=True):
            local |= {batch.step_ids[int(place)]: value for place, value, weight in part.tolist() if weight}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        parts: list[dict[StepId, float]] = [{} for _ in range(group.size())]
        torch.distributed.all_gather_object(parts, local, group=group)
        found = {step: value for part in parts for step, value in part.items()}
    return broadcast_from_last_stage(found)


def _with_credit(batch: Microbatch, credit: StepCredit) -> Microbatch:
    def of_steps(numbers: dict[StepId, float]) -> Tensor:
        found = torch.tensor([numbers[step] for step in batch.step_ids], dtype=torch.float32)
        return copy_to_device(found, batch.step_index.device)

    return replace(
        batch,
        advantage=of_steps(credit.advantages)[batch.step_index],
        value_targets=of_steps(credit.targets)[batch.step_index[batch.inputs.value_rows]],
    )
