"""The losses against an independent NumPy computation, and their gradients against finite differences of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from megatron_webrl.config.loss import LOSSES, loss_config
from megatron_webrl.trainer.loss.objective import (
    SURROGATES,
    make_objective,
    negative_log_likelihood,
    policy_loss,
    reference_kl,
)
from megatron_webrl.trainer.loss.token_data import TokenData
from tests.trainer.loss.by_hand import LARGEST, VERSION, beyond, by_hand, example, responses, tensors, used_weight

USUAL_SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "importance_weight_cap": 2.0}
USUAL = loss_config(**USUAL_SETTINGS)
CHANGES = [
    *(
        {"name": name, "decoupled": mode != "", "importance_weight_mode": mode or "mask", "dual_clip": dual} | kl
        for name, mode, dual, kl in product(
            ("grpo", "gspo"), ("mask", "truncate", ""), (0.0, 1.5), ({}, {"kl_coefficient": 0.7})
        )
    ),
    *({"name": name, "decoupled": d} for name in ("cispo", "sapo", "dppo", "raft_plus_plus") for d in (True, False)),
    {"name": "cispo", "clip_low": 1.0, "clip_high": 0.1},
    {"name": "sapo", "kl_coefficient": 0.7},
    {"name": "dppo", "dppo_divergence": "kl", "dppo_bound": 0.05},
    *(
        {"importance_weight_level": level, "importance_weight_mode": mode, "importance_weight_floor": 0.7}
        for level in ("token", "geometric", "product")
        for mode in ("mask", "truncate")
    ),
    {"name": "gspo", "importance_weight_level": "product"},
    {"name": "gspo", "importance_weight_level": "token"},
    {"kl_rejection_bound": 0.3, "kl_rejection_estimator": "k1"},
    {"kl_rejection_bound": 0.3},
    {"max_token_lag": 3},
    {"max_token_lag": 3, "decoupled": False, "entropy_coefficient": 0.4},
    {
        "name": "gspo", "importance_weight_level": "product", "importance_weight_floor": 0.2, "max_token_lag": 4,
        "kl_rejection_bound": 0.5, "entropy_coefficient": 0.4, "kl_coefficient": 0.7,
    },
]  # fmt: skip


def variant(name: str = "grpo", **changes: Any) -> Any:
    """Settings of a loss, with those of USUAL that it has."""
    own = {each.name for each in fields(LOSSES[name])}
    usual = {key: value for key, value in USUAL_SETTINGS.items() if key in own}
    return loss_config(name, **usual | {key: value for key, value in changes.items() if key in own})


VARIANTS = [variant(**changes) for changes in CHANGES]


def test_every_loss_equals_a_computation_by_hand() -> None:
    for config, seed in product(VARIANTS, range(5)):
        data = example(seed)
        loss, _ = make_objective(config, None, VERSION)(torch.from_numpy(data["current"]), tensors(data))
        assert loss.item() == pytest.approx(by_hand(data["current"], data, config), rel=1e-9), (config, seed)


def test_gradients_at_the_logits_equal_finite_differences() -> None:
    data = example(11, (4, 1, 5))
    rng = np.random.default_rng(5)
    logits, targets = rng.normal(0, 1.5, (10, 4)), rng.integers(0, 4, 10)
    logits[np.arange(10), targets] += 1.0
    places = np.arange(10)

    def chosen(values: np.ndarray) -> np.ndarray:
        return values[places, targets] - np.log(np.exp(values).sum(axis=1))

    def entropy(values: np.ndarray) -> np.ndarray:
        shares = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        return -(shares * np.log(shares)).sum(axis=1)

    near = chosen(logits) - data["current"]  # keep the ratios where the example has them
    given = ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs")
    data |= {name: np.minimum(data[name] + near, LARGEST) for name in given}
    step = 1e-6
    for config in VARIANTS:
        tensor = torch.from_numpy(logits).requires_grad_()
        scores = torch.log_softmax(tensor, dim=1)
        tokens = replace(tensors(data), entropy=-(scores.exp() * scores).sum(dim=1))
        make_objective(config, None, VERSION)(scores[places, targets], tokens)[0].backward()
        for place in np.ndindex(*logits.shape):
            values = []
            for sign in (1, -1):
                moved = logits.copy()
                moved[place] += sign * step
                values.append(by_hand(chosen(moved), data | {"entropy": entropy(moved)}, config, chosen(logits)))
            wanted = (values[0] - values[1]) / (2 * step)
            assert tensor.grad[place].item() == pytest.approx(wanted, abs=1e-6), (config, place)
        assert float(tensor.grad.abs().max()) > 0.01, config


def test_metrics_count_what_the_equations_say() -> None:
    data = example(2, (8, 3, 11, 5, 7, 2, 9, 4) * 8)
    moved = data["current"] - data["proximal_logprobs"]
    for name, mode in product(("grpo", "gspo"), ("mask", "truncate")):
        config = variant(name, importance_weight_mode=mode, dual_clip=1.5, importance_weight_cap=1.5)
        _, sums = policy_loss(torch.from_numpy(data["current"]), tensors(data), config)
        wanted: Counter[str] = Counter()
        for response, t in ((each, t) for each in responses(data) for t in each if data["weight"][t]):
            ratio = np.exp(moved[response].mean() if name == "gspo" else moved[t])
            off, advantage = used_weight(response, t, data, config), data["advantage"][t]
            wanted["importance_weight_capped"] += beyond(response, t, data, config)[1]["importance_weight_capped"]
            wanted["behaviour_importance_weight"] += off
            wanted["policy_ratio"] += ratio
            wanted["approx_kl"] += np.exp(moved[t]) - 1 - moved[t]
            if off > 0:
                wanted["clipped"] += (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
                wanted["dual_clipped"] += advantage < 0 and ratio > 1.5
        figures = {key: value.item() for key, value in sums.items()}
        assert {key: figures[key] for key in wanted} == pytest.approx(dict(wanted)), (name, mode)
        assert len(wanted) == 6
        assert all(value > 0 for value in wanted.values())
        assert figures["clipped_logprob/count"] == figures["clipped"]
        assert set(figures) - set(wanted) == {f"clipped_logprob/{key}" for key in ("count", "sum", "squares")}


def test_on_policy_the_gradient_is_that_of_the_policy_gradient() -> None:
    data = example(3)
    data["behaviour_logprobs"] = data["proximal_logprobs"] = data["current"]
    for name in SURROGATES:
        tensor = torch.from_numpy(data["current"]).requires_grad_()
        policy_loss(tensor, tensors(data), variant(name))[0].backward()
        advantage = np.maximum(data["advantage"], 0) if name == "raft_plus_plus" else data["advantage"]
        np.testing.assert_allclose(tensor.grad.numpy(), -data["weight"] * advantage, rtol=1e-12, err_msg=name)


def test_without_decoupling_fresh_tokens_give_the_same_loss() -> None:
    data = example(4)
    data["behaviour_logprobs"] = data["proximal_logprobs"]
    current = torch.from_numpy(data["current"])
    with_it, without = (policy_loss(current, tensors(data), replace(USUAL, decoupled=d)) for d in (True, False))
    assert with_it[0].item() == without[0].item()


def single(current: float, **values: float) -> tuple[torch.Tensor, TokenData]:
    """One response of one token, in float32 as in training."""
    given = {
        "behaviour_logprobs": -1.0,
        "proximal_logprobs": -1.0,
        "advantage": 1.0,
        "weight": 1.0,
        "reference_logprobs": -1.0,
    } | values
    data = {name: torch.tensor([value], dtype=torch.float32) for name, value in given.items()}
    tensor = torch.tensor([current], dtype=torch.float32, requires_grad=True)
    return tensor, TokenData(
        **data, step_index=torch.zeros(1, dtype=torch.int64), step_lengths=torch.ones(1),
        versions=torch.tensor([VERSION]), entropy=torch.zeros(1),
    )  # fmt: skip


def test_an_extreme_ratio_keeps_loss_and_gradient_finite() -> None:
    for config, advantage, far in product(VARIANTS, (1.0, -1.0), (150.0, -150.0)):
        for moved in ({}, {"behaviour_logprobs": -1.0 - far}, {"reference_logprobs": -1.0 + far}):
            tensor, data = single(-1.0 + (far if not moved else 0.1), advantage=advantage, **moved)
            loss, sums = make_objective(config, None, VERSION)(tensor, data)
            loss.backward()
            for value in (loss, tensor.grad, *sums.values()):
                assert torch.isfinite(value).all(), (config, advantage, far, moved)


def test_tokens_without_weight_or_advantage_have_no_gradient() -> None:
    data = example(6)
    for config, name in product(VARIANTS, ("weight", "advantage")):
        bare = replace(config, kl_coefficient=0.0, entropy_coefficient=0.0)
        nothing = tensors(data | {name: np.zeros_like(data[name])})
        tensor = torch.from_numpy(data["current"]).requires_grad_()
        loss, sums = make_objective(bare, None, VERSION)(tensor, nothing)
        loss.backward()
        assert loss.item() == 0, (config, name)
        assert not tensor.grad.any(), (config, name)
        assert sums.get("dual_clipped", 0) == 0, (config, name)
        if name == "weight":
            assert sums["clipped"] == 0, config


def test_nan_reaches_the_gradient() -> None:
    """The optimiser refuses such a gradient; a loss that ignored the token would hide it."""
    for config in VARIANTS:
        places = ["behaviour_logprobs", "advantage", "weight"]
        places += ["proximal_logprobs"] * config.decoupled + ["reference_logprobs"] * bool(config.kl_coefficient)
        for where in places:  # only what the loss looks at
            tensor, data = single(-1.1, **{where: math.nan})
            make_objective(config, None, VERSION)(tensor, data)[0].backward()
            assert torch.isnan(tensor.grad).all(), (config, where)


def test_the_reference_divergence_is_the_expectation_of_its_estimate() -> None:
    """Over all tokens of a small vocabulary, weighted by the policy; here no ratio is beyond the limit."""
    rng = np.random.default_rng(0)
    now, start = (values - np.log(np.exp(values).sum()) for values in rng.normal(0, 0.5, (2, 50)))
    data = example(0, (50,)) | {"weight": np.exp(now), "reference_logprobs": start}
    value, _ = reference_kl(torch.from_numpy(now), tensors(data))
    assert value.item() == pytest.approx((np.exp(now) * (now - start)).sum(), rel=1e-9)


def test_a_token_that_the_policy_unlearned_pulls_no_more_than_the_limit() -> None:
    """And one of which the policy is too sure pulls as the estimate says."""
    log_ratios = np.array([-40.0, -3.0, 0.0, 1.0, math.log(9.99), math.log(10.01), 5.0, 17.0, 40.0])
    data = example(0, (len(log_ratios),))
    data |= {"weight": np.full(len(log_ratios), 0.5), "reference_logprobs": data["current"] + log_ratios}
    now = torch.from_numpy(data["current"]).requires_grad_()
    value, metrics = reference_kl(now, tensors(data))
    value.backward()
    ratios = np.exp(log_ratios)
    exact = ratios - 1 - log_ratios
    beyond = 9 - math.log(10) + 9 * (log_ratios - math.log(10))
    wanted = np.where(ratios > 10, beyond, exact)
    assert value.item() == pytest.approx(0.5 * wanted.sum())
    assert metrics["reference_kl"].item() == pytest.approx(wanted.sum())
    np.testing.assert_allclose(now.grad.numpy(), -0.5 * (np.minimum(ratios, 10) - 1), atol=1e-12)


def test_likelihood_counts_tokens_with_positive_advantage_only() -> None:
    data = example(4)
    tensor = torch.from_numpy(data["current"]).requires_grad_()
    loss, _ = negative_log_likelihood(tensor, tensors(data))
    loss.backward()
    wanted = 0.0
    for now, weight, advantage in zip(data["current"], data["weight"], data["advantage"], strict=True):
        wanted -= weight * now if advantage > 0 else 0.0
    assert loss.item() == pytest.approx(wanted)
    np.testing.assert_array_equal(tensor.grad.numpy(), -data["weight"] * (data["advantage"] > 0))
