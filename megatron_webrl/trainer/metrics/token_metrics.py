"""Metrics of an update over its tokens: sums of micro-batches, and what they become. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_webrl.trainer.loss.token_data import TokenData, k3

PER_STEP_METRICS = ("loss", "gradient_norm", "gradient_clipped", "learning_rate", "value_loss")
"""Reported as means over the optimiser steps; the last with a step critic."""

PER_TOKEN_METRICS = (
    "dual_clipped",
    "importance_weight_capped",
    "importance_weight_floored",
    "kl_rejected",
    "lag_masked",
    "policy_ratio",
    "behaviour_importance_weight",
    "approx_kl",
    "reference_kl",
    "behaviour_kl_k1",
    "behaviour_kl_k3",
    "entropy",
    "teacher_missing",
    "teacher_clipped",
)
"""Sums that are reported as means over the response tokens of all passes."""

OWN_PREFIX = "own/"  # of what a loss by import path sums over tokens, reported as such means, too

CRITIC_METRICS = ("value_mean", "explained_variance")
"""Of the step critic, over the steps of episodes; the last is missing where all returns are the same."""

TOKEN_DISTRIBUTIONS = ("behaviour_logprob", "current_logprob", "clipped_logprob", "advantage", "teacher_kl")


def moments(name: str, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Scalars `name`/count, /sum and /squares of `values` [tokens] where `mask`, bool [tokens], holds."""
    chosen = torch.where(mask, values.detach(), torch.zeros_like(values))
    return {f"{name}/count": mask.sum(), f"{name}/sum": chosen.sum(), f"{name}/squares": (chosen * chosen).sum()}


def summarise(name: str, totals: Mapping[str, float]) -> dict[str, float]:
    """`name`_mean and _std (population) from the totals of `moments`; none without tokens."""
    count = totals.get(f"{name}/count", 0.0)
    if not count:
        return {}
    mean = totals[f"{name}/sum"] / count
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(max(0.0, totals[f"{name}/squares"] / count - mean * mean)),
    }


def token_statistics(current: Tensor, entropy: Tensor, data: TokenData, succeeded: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of weight above 0; see `moments` for the names with a slash.

    `current`, `entropy`: float32 [tokens] of the current policy; `succeeded`: bool [tokens], of successful episodes.

    behaviour_kl_k1, behaviour_kl_k3   estimates of KL(behave || theta) from its sample: - log r and r - 1 - log r,
                                       r = pi_theta / pi_behave
    """
    current, counted = current.detach(), data.weight > 0
    mask = counted.to(current.dtype)
    log_ratio = current - data.behaviour_logprobs
    success = mask * succeeded
    entropy = entropy.detach()
    return {
        "response_tokens": mask.sum(),
        "success_tokens": success.sum(),
        "entropy": (entropy * mask).sum(),
        "success_entropy": (entropy * success).sum(),
        "behaviour_kl_k1": -(log_ratio * mask).sum(),
        "behaviour_kl_k3": (k3(log_ratio) * mask).sum(),
        **moments("behaviour_logprob", data.behaviour_logprobs, counted),
        **moments("current_logprob", current, counted),
        **moments("advantage", data.advantage, counted),
    }


def loss_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Metrics by MLflow name from the totals of `train_batch`; those without tokens are left out."""
    tokens = totals["response_tokens"]
    metrics = {name: totals[name] for name in (*PER_STEP_METRICS, *CRITIC_METRICS) if name in totals}
    metrics |= {name: totals[name] / max(1.0, tokens) for name in PER_TOKEN_METRICS if name in totals}
    metrics |= {name: total / max(1.0, tokens) for name, total in totals.items() if name.startswith(OWN_PREFIX)}
    if totals.get("replayed_tokens"):
        metrics["routing_replayed"] = totals["replayed_tokens"] / totals["tokens"]
    success = totals["success_tokens"]
    if success:
        metrics["entropy/success"] = totals["success_entropy"] / success
    if tokens > success:
        metrics["entropy/failure"] = (totals["entropy"] - totals["success_entropy"]) / (tokens - success)
    for name in TOKEN_DISTRIBUTIONS:
        metrics |= summarise(name, totals)
    return metrics
