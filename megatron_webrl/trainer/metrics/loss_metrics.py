"""Metrics of an update from the sums and extremes over its tokens. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_webrl.trainer.metrics.moments import summarise

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

CRITIC_METRICS = ("value_mean", "explained_variance")
"""Of the step critic, over the steps of episodes; the last is missing where all returns are the same."""

TOKEN_DISTRIBUTIONS = ("behaviour_logprob", "current_logprob", "clipped_logprob", "advantage", "teacher_kl")


def loss_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Metrics by MLflow name from the totals of `train_batch`; those without tokens are left out."""
    tokens = totals["response_tokens"]
    metrics = {name: totals[name] for name in (*PER_STEP_METRICS, *CRITIC_METRICS) if name in totals}
    metrics |= {name: totals[name] / max(1.0, tokens) for name in PER_TOKEN_METRICS if name in totals}
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
