"""Weights of tokens in the objective of a minibatch. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass


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
