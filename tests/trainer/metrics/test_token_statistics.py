"""Statistics of tokens against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_webrl.trainer.loss.token_data import TokenData
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics, moments, summarise, token_statistics

rng = np.random.default_rng(0)
PASSES = [
    {
        "current": -rng.random(count) * 3,
        "behaviour": -rng.random(count) * 3,
        "entropy": rng.random(count),
        "advantage": rng.normal(0, 1, count),
        "weight": (rng.random(count) > 0.3).astype(float),
        "succeeded": rng.random(count) > 0.4,
    }
    for count in (40, 1, 0, 25)
]


def totals_of(each: dict[str, np.ndarray]) -> dict[str, float]:
    tensors = {name: torch.from_numpy(values) for name, values in each.items()}
    data = TokenData(
        behaviour_logprobs=tensors["behaviour"], proximal_logprobs=tensors["current"], advantage=tensors["advantage"],
        weight=tensors["weight"], step_index=torch.zeros(0, dtype=torch.int64), step_lengths=torch.zeros(0),
        versions=torch.zeros(0),
    )  # fmt: skip
    sums = token_statistics(tensors["current"], tensors["entropy"], data, tensors["succeeded"])
    return {name: value.item() for name, value in sums.items()}


def test_metrics_over_several_passes_are_those_of_all_tokens_together():
    parts = [totals_of(each) for each in PASSES]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    totals |= {
        "loss": 1.0,
        "gradient_norm": 2.0,
        "gradient_clipped": 0.5,
        "learning_rate": 3.0,
        "clipped_logprob/count": 0.0,
    }
    metrics = loss_metrics(totals)
    together = {name: np.concatenate([each[name] for each in PASSES]) for name in PASSES[0]}
    counted = together["weight"] > 0
    current, behaviour, entropy, advantage, succeeded = (
        together[name][counted] for name in ("current", "behaviour", "entropy", "advantage", "succeeded")
    )
    ratio = np.exp(current - behaviour)
    wanted = {
        "loss": 1.0, "gradient_norm": 2.0, "gradient_clipped": 0.5, "learning_rate": 3.0,
        "entropy": entropy.mean(),
        "entropy/success": entropy[succeeded].mean(),
        "entropy/failure": entropy[~succeeded].mean(),
        "behaviour_kl_k1": (behaviour - current).mean(),
        "behaviour_kl_k3": (ratio - 1 - np.log(ratio)).mean(),
    }  # fmt: skip
    for name, values in (("current_logprob", current), ("behaviour_logprob", behaviour), ("advantage", advantage)):
        wanted |= {f"{name}_mean": values.mean(), f"{name}_std": values.std()}
    assert metrics == pytest.approx(wanted, rel=1e-9)


def test_values_that_are_not_counted_leave_the_sums_finite_and_no_tokens_give_no_distribution():
    values = torch.tensor([math.inf, -1.0, math.nan])
    for mask, wanted in (([False, True, False], {"x_mean": -1.0, "x_std": 0.0}), ([False] * 3, {})):
        totals = {name: value.item() for name, value in moments("x", values, torch.tensor(mask)).items()}
        assert summarise("x", totals) == wanted
