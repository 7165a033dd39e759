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

    per_trajectory              1 / (N |tau|)       multi-step GRPO
    constant                    1 / (N k)           AsyncWebRL (arXiv 2606.05597): failures, being longer, are not
                                                    under-weighted
    token_mean                  1 / tokens          mean over all tokens of the minibatch
    async_webrl_constant        1 / (k tokens)      AsyncWebRL's released code: advantages A / k, then token_mean
    async_webrl_per_trajectory  1 / (|tau| tokens)  the same code with A / |tau|

    Raises ValueError for another name.
    """
    weights = {
        "constant": 1.0 / (totals.trajectories * constant_steps),
        "per_trajectory": 1.0 / (totals.trajectories * steps),
        "token_mean": 1.0 / totals.tokens,
        "async_webrl_constant": 1.0 / (constant_steps * totals.tokens),
        "async_webrl_per_trajectory": 1.0 / (steps * totals.tokens),
    }
    if normalizer not in weights:
        raise ValueError(f"normalizer {normalizer!r} is not one of {', '.join(weights)}")
    return weights[normalizer]
