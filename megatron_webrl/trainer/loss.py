"""Losses over the response tokens of one micro-batch. Pure functions. docs/algorithm.md explains them together.

Notation: policies theta (current), prox (at the start of the update), behave (that produced the token), ref (at the
start of RL). Tensors are [tokens] unless said otherwise, log-probabilities at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_webrl.config.loss import LossConfig
from megatron_webrl.trainer.metrics.moments import moments

LOG_RATIO_LIMIT = 20.0  # log-ratios are clamped before exp, whose overflow would turn a zero gradient into NaN


@dataclass(frozen=True)
class TokenData:
    """Constants of the response tokens of one micro-batch."""

    behaviour_logprobs: Tensor  # float32 [tokens]
    proximal_logprobs: Tensor  # float32 [tokens]
    advantage: Tensor  # float32 [tokens]
    weight: Tensor  # float32 [tokens], see token_weight; 0 for padding
    step_index: Tensor  # int64 [tokens], index of the token's step in the micro-batch
    step_lengths: Tensor  # float32 [steps], response tokens of each step on all context-parallel ranks
    reference_logprobs: Tensor | None = None  # float32 [tokens]; None without a KL penalty


Objective = Callable[[Tensor, TokenData], tuple[Tensor, dict[str, Tensor]]]
"""Current log-probabilities -> loss, to be summed over micro-batches and ranks, and for metrics sums and `moments`."""


@dataclass(frozen=True)
class MinibatchTotals:
    """Totals of one minibatch over all data-parallel ranks, by which normalizers divide."""

    trajectories: int
    tokens: int


def token_weight(normalizer: str, totals: MinibatchTotals, steps: int, constant_steps: int) -> float:
    """Weight of each token of a trajectory with |tau| = `steps`, one of N in the minibatch; k = `constant_steps`.

    per_trajectory  1 / (N |tau|)   multi-step GRPO
    constant        1 / (N k)       AsyncWebRL (arXiv 2606.05597): failures, being longer, are not under-weighted
    token_mean      1 / tokens      mean over all tokens of the minibatch
    """
    if normalizer == "constant":
        return 1.0 / (totals.trajectories * constant_steps)
    if normalizer == "per_trajectory":
        return 1.0 / (totals.trajectories * steps)
    if normalizer == "token_mean":
        return 1.0 / totals.tokens
    raise ValueError(f"normalizer {normalizer!r} is not one of constant, per_trajectory, token_mean")


def make_objective(config: LossConfig, group: ProcessGroup | None) -> Objective:
    """The configured loss plus kl_coefficient * reference_kl; gspo is collective over the context-parallel `group`."""
    base = OBJECTIVES[config.name](config, group)
    if not config.kl_coefficient:
        return base

    def penalised(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = base(current, data)
        divergence, more = reference_kl(current, data)
        return value + config.kl_coefficient * divergence, sums | more

    return penalised


def clipped_surrogate(
    current: Tensor, data: TokenData, config: LossConfig, group: ProcessGroup | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with dual clip, decoupled or not, with ratios per token or per response.

    L = - sum weight * w * f(A, r)
    f(A, r) = min(r A, clamp(r, 1 - low, 1 + high) A), bounded below by dual_clip * A where A < 0 (arXiv 1912.09729).

    decoupled (arXiv 2505.24298, eq. 5)  r = pi_theta / pi_prox, w = pi_prox / pi_behave with importance_weight_cap
    otherwise (PPO, arXiv 1707.06347)    r = pi_theta / pi_behave, w = 1

    name=gspo (arXiv 2507.18071, eq. 13 to 15): r and w are geometric means over the tokens of a response. In
    r_t = sg[r] * pi_theta,t / sg[pi_theta,t] the mean needs no gradient, and sum_t r_t has the gradient of |y| r.

    Metrics, summed over tokens of weight above 0: clipped, dual_clipped (no gradient; without tokens masked by cap),
    importance_weight_capped, policy_ratio (r), behaviour_importance_weight (capped w), approx_kl (k3 of r per token);
    and clipped_logprob, the moments of log pi_theta over the clipped tokens.
    """
    log_ratio = current - (data.proximal_logprobs if config.decoupled else data.behaviour_logprobs)
    with torch.no_grad():
        counted = (data.weight > 0).to(current.dtype)
        divergence = k3(log_ratio)
        log_weight = data.proximal_logprobs - data.behaviour_logprobs if config.decoupled else torch.zeros_like(current)
    if config.name == "gspo":
        means = mean_per_step(torch.stack([log_ratio.detach(), log_weight]), data, group)
        log_ratio, log_weight = means[0] + (current - current.detach()), means[1]
    with torch.no_grad():
        weight, over = behaviour_importance_weight(log_weight, config)
        unmasked = counted * (1 - over) if config.importance_weight_mode == "mask" else counted
    ratio = torch.exp(_clamp(log_ratio))
    unclipped = ratio * data.advantage
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * data.advantage
    value = torch.minimum(unclipped, clipped)
    dual = torch.zeros_like(counted)
    if config.dual_clip:
        bound = config.dual_clip * data.advantage
        dual = ((data.advantage < 0) & (value < bound)).to(current.dtype)
        value = torch.where(data.advantage < 0, torch.maximum(value, bound), value)
    loss = -(data.weight * weight * value).sum()
    with torch.no_grad():
        is_clipped = unmasked * (clipped < unclipped)
        sums = {
            "clipped": is_clipped.sum(),
            "dual_clipped": (unmasked * dual).sum(),
            "importance_weight_capped": (counted * over).sum(),
            "policy_ratio": (counted * ratio).sum(),
            "behaviour_importance_weight": (counted * weight).sum(),
            "approx_kl": (counted * divergence).sum(),
            **moments("clipped_logprob", current, is_clipped > 0),
        }
    return loss, sums


def behaviour_importance_weight(log_weight: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """w = pi_prox / pi_behave with the cap applied, and 1 where it exceeds the cap, else 0.

    mask: w = 0 above the cap; truncate: w = min(w, cap). NaN stays NaN: the gradient is refused.
    """
    weight = torch.exp(log_weight)
    over = weight > config.importance_weight_cap
    bound = 0.0 if config.importance_weight_mode == "mask" else config.importance_weight_cap
    return torch.where(over, torch.full_like(weight, bound), weight), over.to(weight.dtype)


def mean_per_step(values: Tensor, data: TokenData, group: ProcessGroup | None = None) -> Tensor:
    """For each token the mean over its step's response. [n, tokens] -> [n, tokens]. Collective."""
    sums = values.new_zeros(len(values), len(data.step_lengths)).index_add(1, data.step_index, values)
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    return (sums / data.step_lengths.to(values.dtype))[:, data.step_index]


def reference_kl(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
    """KL estimate: sum weight * k3 of pi_ref / pi_theta (arXiv 2402.03300, eq. 4). Raises ValueError without pi_ref."""
    if data.reference_logprobs is None:
        raise ValueError(
            "trainer.loss.kl_coefficient needs the reference's log-probabilities; Learner.reference is None"
        )
    divergence = k3(data.reference_logprobs - current)
    counted = (data.weight > 0).to(current.dtype)
    return (data.weight * divergence).sum(), {"reference_kl": (counted * divergence.detach()).sum()}


def negative_log_likelihood(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood - sum weight * log pi_theta, over tokens with a positive advantage.

    Demonstrations and RAFT (arXiv 2304.06767): the caller sets advantage 1 for imitated tokens and 0 for others.
    """
    return -(data.weight * (data.advantage > 0) * current).sum(), {}


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, never negative (Schulman, Approximating KL Divergence, 2020)."""
    bounded = _clamp(log_ratio)
    return torch.exp(bounded) - 1 - bounded


def _clamp(log_ratio: Tensor) -> Tensor:
    """Clamp to LOG_RATIO_LIMIT, without a gradient beyond it. NaN keeps its gradient, unlike with torch.clamp."""
    return torch.where(
        log_ratio.abs() > LOG_RATIO_LIMIT, log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), log_ratio
    )


OBJECTIVES: dict[str, Callable[[LossConfig, ProcessGroup | None], Objective]] = {
    "grpo": lambda config, group: partial(clipped_surrogate, config=config),
    "gspo": lambda config, group: partial(clipped_surrogate, config=config, group=group),
    "raft": lambda config, group: negative_log_likelihood,
}  # by trainer.loss.name
