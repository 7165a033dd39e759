"""Surrogates f(A, r) per token, which the objective weights and sums. Pure functions.

Each takes `PolicyRatio` and the advantage, [tokens], and returns f and the tokens whose update it limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.config.loss import ClipConfig, DppoConfig, DualClipConfig, OffPolicyLossConfig, RaftPlusPlusConfig


@dataclass(frozen=True)
class PolicyRatio:
    """Current policy and the one it is compared with: prox if decoupled, else behave. [tokens] each."""

    ratio: Tensor  # r = theta / old, per token or per response, with the gradient of theta
    current: Tensor  # log theta, with its gradient
    old: Tensor  # log-probabilities of the old policy


@dataclass(frozen=True)
class SurrogateTerms:
    """f(A, r) and which tokens it limits. [tokens] each."""

    value: Tensor
    clipped: Tensor  # bool, the gradient is stopped; cispo: the ratio is bounded
    dual_clipped: Tensor | None = None  # bool, the dual clip stops the gradient


Surrogate = Callable[[PolicyRatio, Tensor, Any], SurrogateTerms]  # of the settings of the loss


def clipped_surrogate(policy: PolicyRatio, advantage: Tensor, config: DualClipConfig) -> SurrogateTerms:
    """PPO's clip (arXiv 1707.06347, eq. 7) with dual clip (arXiv 1912.09729).

    f = min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), and at least dual_clip * A where A < 0
    """
    unclipped = policy.ratio * advantage
    clipped = policy.ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
    value = torch.minimum(unclipped, clipped)
    dual = torch.zeros_like(value, dtype=torch.bool)
    if config.dual_clip:
        bound = config.dual_clip * advantage
        dual = (advantage < 0) & (value < bound)
        value = torch.where(advantage < 0, torch.maximum(value, bound), value)
    return SurrogateTerms(value, clipped < unclipped, dual)


def cispo(policy: PolicyRatio, advantage: Tensor, config: ClipConfig) -> SurrogateTerms:
    """CISPO (arXiv 2506.13585, eq. 4 and 5): the clip bounds the weight of a token and stops no gradient.

    f = sg[clamp(r, 1 - clip_low, 1 + clip_high)] * A * log theta. clip_low=1 is the paper's, without a lower bound.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = policy.ratio.detach()
    return SurrogateTerms(ratio.clamp(low, high) * advantage * policy.current, (ratio < low) | (ratio > high))


def sapo(policy: PolicyRatio, advantage: Tensor, config: OffPolicyLossConfig) -> SurrogateTerms:
    """Soft adaptive policy optimisation, SAPO (arXiv 2511.20347): a smooth gate instead of a clip.

    f = 4 / T * sigmoid(T (r - 1)) * A, T = 1.0 where A > 0, else 1.05, as in the paper. On policy df/dr = A; the
    gate closes on both sides of r = 1, the sooner the higher T.
    """
    positive, negative = (torch.full_like(advantage, each) for each in (1.0, 1.05))
    temperature = torch.where(advantage > 0, positive, negative)
    gate = 4 / temperature * torch.sigmoid(temperature * (policy.ratio - 1))
    return SurrogateTerms(gate * advantage, torch.zeros_like(advantage, dtype=torch.bool))


def dppo(policy: PolicyRatio, advantage: Tensor, config: DppoConfig) -> SurrogateTerms:
    """Divergence proximal policy optimisation, DPPO (arXiv 2602.04879), with a binary divergence per token.

    f = M r A; M = 0 where D > dppo_bound and the update would increase D: A > 0 and theta > old, or A < 0 and
    theta < old. D compares two outcomes, the token and all others (eq. 13 and 14), with p = theta, q = old:
    total_variation  |p - q|
    kl               q log(q / p) + (1 - q) log((1 - q) / (1 - p))
    """
    with torch.no_grad():
        divergence = binary_divergence(policy.current, policy.old, config.dppo_divergence)
        away = advantage * (policy.current - policy.old) > 0
        stopped = away & (divergence > config.dppo_bound)
    value = policy.ratio * advantage
    return SurrogateTerms(torch.where(stopped, torch.zeros_like(value), value), stopped)


def binary_divergence(current: Tensor, old: Tensor, kind: str) -> Tensor:
    """Divergence of two Bernoulli distributions from log-probabilities of one outcome, see `dppo`. [tokens]."""
    if kind == "total_variation":
        return (torch.exp(current) - torch.exp(old)).abs()
    tiny = torch.finfo(current.dtype).tiny  # keeps the logarithm of a token that is certain finite
    rest, old_rest = (-torch.expm1(current)).clamp(min=tiny), (-torch.expm1(old)).clamp(min=tiny)
    return torch.exp(old) * (old - current) + old_rest * (old_rest.log() - rest.log())


def raft_plus_plus(policy: PolicyRatio, advantage: Tensor, config: RaftPlusPlusConfig) -> SurrogateTerms:
    """RAFT++ (arXiv 2504.11343): successes only, weighted by the ratio and clipped.

    f = min(r, 1 + clip_high) for successes. The caller sets advantage 1 for these; others have no effect. No lower
    clip and no dual clip: with a positive advantage the minimum chooses neither.
    """
    success = advantage.clamp(min=0)
    value = policy.ratio.clamp(max=1 + config.clip_high) * success
    return SurrogateTerms(value, (success > 0) & (policy.ratio > 1 + config.clip_high))


SURROGATES: dict[str, Surrogate] = {
    "grpo": clipped_surrogate,
    "gspo": clipped_surrogate,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "raft_plus_plus": raft_plus_plus,
}  # by trainer.loss.name
