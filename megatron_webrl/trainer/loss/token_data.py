"""Response tokens of one micro-batch, and functions of log-ratios. Pure functions.

Notation: policies theta (current), prox (at the start of the update), behave (that produced the token), ref (at the
start of RL). Tensors are [tokens] unless said otherwise, log-probabilities at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

LOG_RATIO_LIMIT = 20.0  # log-ratios are clamped before exp, whose overflow would turn a zero gradient into NaN


@dataclass(frozen=True)
class StepValues:
    """Values of the steps of one micro-batch whose first response token this rank scores."""

    predicted: Tensor  # float32 [values] of the current critic, with its gradient
    targets: Tensor  # float32 [values]
    weight: Tensor  # float32 [values]; 0 for padding


@dataclass(frozen=True, kw_only=True)
class ResponseTokens:
    """The response tokens of one micro-batch, before any pass."""

    behaviour_logprobs: Tensor  # float32 [tokens]
    advantage: Tensor  # float32 [tokens]
    weight: Tensor  # float32 [tokens], see token_weight; 0 for padding
    step_index: Tensor  # int64 [tokens], index of the token's step in the micro-batch
    step_lengths: Tensor  # float32 [steps], response tokens of each step on all context-parallel ranks
    versions: Tensor  # int32 [tokens], policy version that produced the token
    teacher_logprobs: Tensor | None = None  # float32 [tokens], NaN for tokens without one; for distillation


@dataclass(frozen=True, kw_only=True)
class TokenData(ResponseTokens):
    """What a loss gets: constants, except for the entropy."""

    proximal_logprobs: Tensor  # float32 [tokens]
    reference_logprobs: Tensor | None = None  # float32 [tokens]; None without a KL penalty
    entropy: Tensor | None = None  # float32 [tokens] of the current policy, with its gradient; for the entropy bonus
    values: StepValues | None = None  # None without a step critic


Objective = Callable[[Tensor, TokenData], tuple[Tensor, dict[str, Tensor]]]
"""Current log-probabilities -> loss, to be summed over micro-batches and ranks, and for metrics sums and `moments`."""


def mean_per_step(values: Tensor, data: TokenData, group: ProcessGroup | None = None) -> Tensor:
    """For each token the mean over its step's response. [n, tokens] -> [n, tokens]. Collective."""
    sums = values.new_zeros(len(values), len(data.step_lengths)).index_add(1, data.step_index, values)
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    return (sums / data.step_lengths.to(values.dtype))[:, data.step_index]


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, never negative (Schulman, Approximating KL Divergence, 2020)."""
    bounded = clamp_log_ratio(log_ratio)
    return torch.exp(bounded) - 1 - bounded


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp to LOG_RATIO_LIMIT, without a gradient beyond it. NaN keeps its gradient, unlike with torch.clamp."""
    return torch.where(
        log_ratio.abs() > LOG_RATIO_LIMIT, log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), log_ratio
    )
