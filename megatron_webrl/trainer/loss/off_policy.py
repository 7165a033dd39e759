"""Off-policy control: the decoupled weight w = pi_prox / pi_behave, and the tokens left out of the surrogate. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_webrl.config.loss import OffPolicyLossConfig
from megatron_webrl.trainer.data.batching import NO_VERSION
from megatron_webrl.trainer.loss.token_data import TokenData, clamp_log_ratio, k3, mean_per_step


@dataclass(frozen=True)
class OffPolicyCorrection:
    """What off-policy control makes of each token; without a gradient."""

    weight: Tensor  # float32 [tokens], w within its bounds; 0 for masked tokens
    masked: Tensor  # bool [tokens], left out of the surrogate
    beyond: dict[str, Tensor]  # metric -> bool [tokens], tokens beyond one bound; one token can be beyond several


@torch.no_grad()
def off_policy_correction(
    data: TokenData, config: OffPolicyLossConfig, group: ProcessGroup | None = None, version: int | None = None
) -> OffPolicyCorrection:
    """The decoupled weight (arXiv 2505.24298, eq. 5) after its bounds, KL rejection and the mask of old tokens.

    Without `decoupled` w is 1, and only the mask of old tokens applies. Collective over the context-parallel `group`
    for weights per response and for KL rejection. `version`: the current policy's. Raises ValueError if
    max_token_lag has no versions to compare.
    """
    log_weight = torch.zeros_like(data.behaviour_logprobs)
    if config.decoupled:
        log_weight = data.proximal_logprobs - data.behaviour_logprobs
    weight, above, below = bounded_weight(weight_at_level(log_weight, data, config, group), config)
    beyond = {"importance_weight_capped": above}
    masked = above if config.importance_weight_mode == "mask" else torch.zeros_like(above)
    if config.importance_weight_floor:
        beyond["importance_weight_floored"] = below
        masked = masked | below if config.importance_weight_mode == "mask" else masked
    if config.kl_rejection_bound:
        beyond["kl_rejected"] = rejected_by_kl(log_weight, data, config, group)
        masked = masked | beyond["kl_rejected"]
    if config.max_token_lag:
        beyond["lag_masked"] = too_old(data, config.max_token_lag, version)
        masked = masked | beyond["lag_masked"]
    return OffPolicyCorrection(torch.where(masked, torch.zeros_like(weight), weight), masked, beyond)


def weight_at_level(
    log_weight: Tensor, data: TokenData, config: OffPolicyLossConfig, group: ProcessGroup | None = None
) -> Tensor:
    """log w of each token at `importance_weight_level`. [tokens] -> [tokens]. Collective, except per token.

    token      log w_t                               TIS, MIS per token
    geometric  1/|y| sum_t log w_t                   as GSPO's ratio (arXiv 2507.18071, eq. 7)
    product    sum_t log w_t, the response's ratio   unbiased, of high variance; clamped before exp
    auto       geometric with gspo, else token
    """
    level = config.importance_weight_level
    if level == "auto":
        level = "geometric" if config.name == "gspo" else "token"
    if level == "token":
        return log_weight
    mean = mean_per_step(log_weight[None], data, group)[0]
    return mean * data.step_lengths.to(mean.dtype)[data.step_index] if level == "product" else mean


def bounded_weight(log_weight: Tensor, config: OffPolicyLossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """w within [floor, cap], and whether it is above the cap and below the floor, bool. [tokens] each.

    mask      0 outside the bounds (IcePop, arXiv 2510.18855; with the cap alone MIS)
    truncate  the nearer bound outside them (TIS)

    NaN stays NaN: the gradient is refused.
    """
    weight = torch.exp(clamp_log_ratio(log_weight))
    above, below = weight > config.importance_weight_cap, weight < config.importance_weight_floor
    if config.importance_weight_mode == "mask":
        return torch.where(above | below, torch.zeros_like(weight), weight), above, below
    return weight.clamp(config.importance_weight_floor, config.importance_weight_cap), above, below


def rejected_by_kl(
    log_weight: Tensor, data: TokenData, config: OffPolicyLossConfig, group: ProcessGroup | None = None
) -> Tensor:
    """Whether the response's estimate of KL(behave || prox) exceeds kl_rejection_bound, bool [tokens]. Collective.

    Mean over the response's tokens of k1 = - log w or of k3 = w - 1 - log w (Schulman, Approximating KL Divergence,
    2020). Trust Region Masking for Long-Horizon LLM Reinforcement Learning (Li et al., 2026) leaves out such responses
    as a whole: no clip of single tokens bounds the error of a long response.
    """
    estimate = k3(log_weight) if config.kl_rejection_estimator == "k3" else -log_weight
    return mean_per_step(estimate[None], data, group)[0] > config.kl_rejection_bound


def too_old(data: TokenData, max_lag: int, version: int | None) -> Tensor:
    """Whether a token's version is more than `max_lag` older than `version`, or unknown, bool [tokens].

    Raises ValueError without versions.
    """
    if data.versions is None or version is None:
        raise ValueError("trainer.loss.max_token_lag needs the tokens' versions and the current one; one is None")
    return (data.versions == NO_VERSION) | (version - data.versions > max_lag)
