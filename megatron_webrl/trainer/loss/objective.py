"""Losses: the surrogates, the KL penalty, and the objective that a configuration names. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_webrl.config.loss import LossConfig
from megatron_webrl.trainer.loss.token_data import Objective, TokenData, clamp_log_ratio, k3, mean_per_step
from megatron_webrl.trainer.metrics.moments import moments


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
    ratio = torch.exp(clamp_log_ratio(log_ratio))
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


OBJECTIVES: dict[str, Callable[[LossConfig, ProcessGroup | None], Objective]] = {
    "grpo": lambda config, group: partial(clipped_surrogate, config=config),
    "gspo": lambda config, group: partial(clipped_surrogate, config=config, group=group),
    "raft": lambda config, group: negative_log_likelihood,
}  # by trainer.loss.name
