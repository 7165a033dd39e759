"""Losses over the response tokens of one packed row. Pure functions.

Notation: theta is the current policy, prox the proximal policy (at the start of the update), behave the
policy that produced the token. All tensors are [tokens], log-probabilities at the sampling temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_webrl.config import LossConfig


@dataclass(frozen=True)
class TokenData:
    """Constants of the response tokens of one row."""

    behaviour: Tensor  # float32 [tokens]
    proximal: Tensor  # float32 [tokens]
    advantage: Tensor  # float32 [tokens]
    weight: Tensor  # float32 [tokens], see token_weight; 0 for tokens that only stand in


@dataclass(frozen=True)
class BatchSize:
    """What the normalisers divide by: totals of one minibatch over all data-parallel ranks."""

    trajectories: int
    tokens: int


def token_weight(normaliser: str, size: BatchSize, steps: int, k: int) -> float:
    """Weight of each token of a trajectory with `steps` steps.

    per_trajectory  1 / (N |tau|)   multi-step GRPO
    constant        1 / (N k)       AsyncWebRL (arXiv 2606.05597): failures, being longer, are not under-weighted
    token_mean      1 / tokens      mean over all tokens of the minibatch
    with N trajectories in the minibatch, so that the loss is a mean over trajectories.
    """
    if normaliser == "constant":
        return 1.0 / (size.trajectories * k)
    if normaliser == "per_trajectory":
        return 1.0 / (size.trajectories * steps)
    if normaliser == "token_mean":
        return 1.0 / size.tokens
    raise ValueError(f"normaliser {normaliser!r} is not one of constant, per_trajectory, token_mean")


def decoupled_surrogate(current: Tensor, data: TokenData, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled clipped surrogate with dual clip (arXiv 2505.24298, eq. 5; dual clip: arXiv 1912.09729).

    L = - sum weight * w * clip(A, r)    with r = pi_theta / pi_prox and w = pi_prox / pi_behave
    clip(A, r) = min(r A, clamp(r, 1 - low, 1 + high) A), bounded below by dual_clip * A where A < 0.
    Tokens with w above `behaviour_cap` are masked.

    Returns the loss (scalar, to be summed over rows and ranks) and sums over tokens for metrics.
    """
    with torch.no_grad():
        behaviour_weight = torch.exp(data.proximal - data.behaviour)
        counted = (data.weight > 0).float()
        kept = counted * (behaviour_weight <= config.behaviour_cap)
    ratio = torch.exp(current - data.proximal)
    unclipped = ratio * data.advantage
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * data.advantage
    surrogate = torch.minimum(unclipped, clipped)
    bound = config.dual_clip * data.advantage
    bounded = torch.where(data.advantage < 0, torch.maximum(surrogate, bound), surrogate)
    loss = -(data.weight * behaviour_weight * kept * bounded).sum()
    with torch.no_grad():
        sums = {
            "clipped": (kept * (clipped < unclipped)).sum(),
            "dual_clipped": (kept * (data.advantage < 0) * (surrogate < bound)).sum(),
            "capped": (counted - kept).sum(),
            "behaviour_weight": (behaviour_weight * kept).sum(),
            "kl": (kept * (ratio - 1 - (current - data.proximal))).sum(),
        }
    return loss, sums


def likelihood(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood - sum weight * log pi_theta, over tokens with a positive advantage.

    Demonstrations and RAFT (arXiv 2304.06767): the caller gives the imitated tokens advantage 1 and others 0.
    """
    return -(data.weight * (data.advantage > 0) * current).sum(), {}
