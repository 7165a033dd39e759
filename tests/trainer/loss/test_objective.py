"""The losses against an independent NumPy computation, and their gradients against finite differences of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import LOSSES, loss_config
from megatron_webrl.trainer.data.batching import token_weight
from megatron_webrl.trainer.loss import objective
from megatron_webrl.trainer.loss.objective import (
    SURROGATES,
    make_objective,
    negative_log_likelihood,
    off_policy_correction,
    policy_loss,
    reference_kl,
)
from megatron_webrl.trainer.loss.token_data import TokenData
from tests.trainer.loss.by_hand import (
    COEFFICIENT,
    LARGEST,
    TEACHER_CLIP,
    VERSION,
    beyond,
    by_hand,
    example,
    responses,
    taught,
    tensors,
    used_weight,
)

TEACHER = DistillationConfig(coefficient=COEFFICIENT)
USUAL = {"clip_low": 0.2, "clip_high": 0.28, "importance_weight_cap": 2.0}
BOUNDS = {"importance_weight_floor": 0.6, "importance_weight_cap": 1.5, "max_token_lag": 3, "kl_rejection_bound": 0.25}
CHANGES: list[dict[str, Any]] = [
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
    own = {each.name for each in fields(LOSSES[name])}
    return loss_config(name, **{key: value for key, value in (USUAL | changes).items() if key in own})


PLAIN = [variant(**changes) for changes in CHANGES]
TAUGHT = [
    variant(name, decoupled=decoupled, kl_coefficient=kl)
    for name in SURROGATES
    if name != "raft_plus_plus"
    for decoupled, kl in ((True, 0.0), (False, 0.3))
]
VARIANTS = [*((config, None) for config in PLAIN), *((config, TEACHER) for config in TAUGHT)]


@pytest.fixture(autouse=True)
def small_teacher_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "TEACHER_CLIP", TEACHER_CLIP)


def test_every_loss_equals_a_computation_by_hand() -> None:
    for (config, teacher), seed in product(VARIANTS, range(5)):
        data = example(seed)
        loss, _ = make_objective(config, None, VERSION, teacher)(torch.from_numpy(data["current"]), tensors(data))
        wanted = by_hand(data["current"], taught(data, config) if teacher else data, config)
        assert loss.item() == pytest.approx(wanted, rel=1e-9), (config, seed)


def test_async_webrl_constant_is_the_token_mean_of_the_loss_of_advantages_divided_by_k() -> None:
    """Written as AsyncWebRL's released code has it: A / k, both clips, w masked above 5, a mean over all tokens."""
    data, k = example(3), 10
    data = {name: array.repeat(2) for name, array in data.items()}
    data["behaviour_logprobs"][:4] = data["proximal_logprobs"][:4] - 2  # w = 7.4: masked, but in the denominator
    tokens = len(data["current"])
    data["weight"] = np.full(tokens, token_weight("async_webrl_constant", 4, tokens, 3, k))
    found, _ = make_objective(loss_config(), None, VERSION)(torch.from_numpy(data["current"]), tensors(data))
    advantage, ratio = data["advantage"] / k, np.exp(data["current"] - data["proximal_logprobs"])
    loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2))
    loss = np.where(advantage < 0, np.minimum(loss, -3.0 * advantage), loss)
    weight = np.exp(data["proximal_logprobs"] - data["behaviour_logprobs"])
    assert 4 <= (weight > 5).sum() < tokens / 2
    assert found.item() == pytest.approx((loss * np.where(weight > 5, 0, weight)).sum() / tokens, rel=1e-9)


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
    given = ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs", "teacher_logprobs")
    data |= {name: np.minimum(data[name] + near, LARGEST) for name in given}
    step = 1e-6
    for config, teacher in VARIANTS:
        tensor = torch.from_numpy(logits).requires_grad_()
        scores = torch.log_softmax(tensor, dim=1)
        tokens = replace(tensors(data), entropy=-(scores.exp() * scores).sum(dim=1))
        make_objective(config, None, VERSION, teacher)(scores[places, targets], tokens)[0].backward()
        known = taught(data, config) if teacher else data
        for place in np.ndindex(*logits.shape):
            values = []
            for sign in (1, -1):
                moved = logits.copy()
                moved[place] += sign * step
                values.append(by_hand(chosen(moved), known | {"entropy": entropy(moved)}, config, chosen(logits)))
            wanted = (values[0] - values[1]) / (2 * step)
            assert tensor.grad[place].item() == pytest.approx(wanted, abs=1e-6), (config, place)
        assert float(tensor.grad.abs().max()) > 0.01, config


def test_context_parallel_ranks_compute_the_loss_of_a_response_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks one after the other: each adds to its sums those that the other has had before."""
    data, group = example(4), cast(Any, SimpleNamespace(size=lambda: 2))
    parts = [
        {name: array if name == "step_lengths" else array[tokens] for name, array in data.items()}
        for tokens in (slice(20), slice(20, None))  # within the third response, whose weight is above 0
    ]
    moved = (data["proximal_logprobs"] - data["behaviour_logprobs"])[data["step_index"] == 2]
    bound = 0.99 * float((np.exp(moved) - 1 - moved).mean())  # which the response exceeds, but none of its parts
    rejecting = variant(kl_rejection_bound=bound, kl_rejection_estimator="k3")

    def on_rank(rank: int, reduce: Callable[[torch.Tensor], object], config: Any, teacher: Any) -> dict[str, float]:
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: reduce(tensor))
        current, evaluate = torch.from_numpy(parts[rank]["current"]), make_objective(config, group, VERSION, teacher)
        loss, sums = evaluate(current, tensors(parts[rank]))
        return {"loss": loss.item()} | {name: each.item() for name, each in sums.items()}

    for config, teacher in [*VARIANTS, (rejecting, None)]:
        loss, whole = make_objective(config, None, VERSION, teacher)(torch.from_numpy(data["current"]), tensors(data))
        sums: list[list[torch.Tensor]] = [[], []]
        for rank, own in enumerate(sums):
            on_rank(rank, lambda tensor, own=own: own.append(tensor.clone()), config, teacher)
        one, two = (
            on_rank(rank, lambda tensor, others=others: tensor.add_(others.pop(0)), config, teacher)
            for rank, others in enumerate(sums[::-1])
        )
        wanted = {"loss": loss.item()} | {name: each.item() for name, each in whole.items()}
        assert {name: one[name] + two[name] for name in one} == pytest.approx(wanted, rel=1e-9), config


def test_metrics_and_weights_are_those_of_the_equations() -> None:
    data = example(2, (8, 3, 11, 5, 7, 2, 9, 4) * 8)
    moved, counted = data["current"] - data["proximal_logprobs"], data["weight"] > 0
    tokens = [(response, t) for response in responses(data) for t in response]
    configs = [
        variant(name, importance_weight_mode=mode, dual_clip=1.5, importance_weight_cap=1.5)
        for name, mode in product(("grpo", "gspo"), ("mask", "truncate"))
    ]
    configs += [
        loss_config(importance_weight_level=level, importance_weight_mode=mode, kl_rejection_estimator=kind, **BOUNDS)
        for level, mode, kind in product(("auto", "geometric", "product"), ("mask", "truncate"), ("k1", "k3"))
    ]
    for config in configs:
        correction = off_policy_correction(tensors(data), config, None, VERSION)
        weights = [used_weight(response, t, data, config) for response, t in tokens]
        np.testing.assert_allclose(correction.weight.numpy(), weights, rtol=1e-9, err_msg=str(config))
        assert torch.equal(correction.masked, correction.weight == 0)
        _, sums = policy_loss(torch.from_numpy(data["current"]), tensors(data), config, None, VERSION)
        figures = {key: value.item() for key, value in sums.items()}
        for name, outside in correction.beyond.items():
            found = [beyond(response, t, data, config)[1][name] for response, t in tokens]
            assert outside.tolist() == found, (config, name)
            assert 0 < figures.pop(name) == np.sum(found * counted) < np.sum(counted), (config, name)
        wanted: Counter[str] = Counter()
        for (response, t), off in zip(tokens, weights, strict=True):
            if counted[t]:
                ratio = np.exp(moved[response].mean() if config.name == "gspo" else moved[t])
                advantage = data["advantage"][t]
                wanted["behaviour_importance_weight"] += off
                wanted["policy_ratio"] += ratio
                wanted["approx_kl"] += np.exp(moved[t]) - 1 - moved[t]
                if off > 0:
                    high, low, dual = config.clip_high, config.clip_low, config.dual_clip or math.inf
                    wanted["clipped"] += (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
                    wanted["dual_clipped"] += advantage < 0 and ratio > dual
        assert {key: figures.pop(key) for key in wanted} == pytest.approx(dict(wanted)), config
        assert len(wanted) == 5
        assert figures["clipped_logprob/count"] == wanted["clipped"]
        assert set(figures) == {f"clipped_logprob/{key}" for key in ("count", "sum", "squares")}
    assert set(off_policy_correction(tensors(data), loss_config()).beyond) == {"importance_weight_capped"}


def single(current: float, **values: float) -> tuple[torch.Tensor, TokenData]:
    """One response of one token, in float32 as in training."""
    given = dict.fromkeys(("behaviour_logprobs", "proximal_logprobs", "reference_logprobs"), -1.0)
    given |= dict.fromkeys(("advantage", "weight"), 1.0) | values
    data = {name: torch.tensor([value], dtype=torch.float32) for name, value in given.items()}
    tensor = torch.tensor([current], dtype=torch.float32, requires_grad=True)
    return tensor, TokenData(
        **data, step_index=torch.zeros(1, dtype=torch.int64), step_lengths=torch.ones(1),
        versions=torch.tensor([VERSION]), entropy=torch.zeros(1),
    )  # fmt: skip


def test_an_extreme_ratio_keeps_loss_and_gradient_finite() -> None:
    uncapped = variant(importance_weight_level="product", importance_weight_cap=math.inf)
    for config, advantage, far in product([*PLAIN, uncapped], (1.0, -1.0), (150.0, -150.0)):
        for moved in ({}, {"behaviour_logprobs": -1.0 - far}, {"reference_logprobs": -1.0 + far}):
            tensor, data = single(-1.0 + (far if not moved else 0.1), advantage=advantage, **moved)
            loss, sums = make_objective(config, None, VERSION)(tensor, data)
            loss.backward()
            for value in (loss, tensor.grad, *sums.values()):
                assert torch.isfinite(value).all(), (config, advantage, far, moved)


def test_nan_reaches_the_gradient() -> None:
    """The optimiser refuses such a gradient; a loss that ignored the token would hide it."""
    for config, teacher in VARIANTS:
        places = ["behaviour_logprobs", "advantage", "weight"]
        places += ["proximal_logprobs"] * config.decoupled + ["reference_logprobs"] * bool(config.kl_coefficient)
        for where in places:  # only what the loss looks at
            tensor, data = single(-1.1, **{where: math.nan}, **({"teacher_logprobs": -1.0} if teacher else {}))
            make_objective(config, None, VERSION, teacher)(tensor, data)[0].backward()
            assert torch.isnan(tensor.grad).all(), (config, where)


def test_the_reference_divergence_pulls_no_more_than_its_limit() -> None:
    log_ratios = np.array([-40.0, -3.0, 0.0, 1.0, math.log(9.99), math.log(10.01), 5.0, 17.0, 40.0])
    data = example(0, (len(log_ratios),))
    data |= {"weight": np.full(len(log_ratios), 0.5), "reference_logprobs": data["current"] + log_ratios}
    current, ratios = torch.from_numpy(data["current"]).requires_grad_(), np.exp(log_ratios)
    value, metrics = reference_kl(current, tensors(data))
    value.backward()
    tangent = 9 - math.log(10) + 9 * (log_ratios - math.log(10))
    wanted = np.where(ratios > 10, tangent, ratios - 1 - log_ratios)
    assert value.item() == pytest.approx(0.5 * wanted.sum())
    assert metrics["reference_kl"].item() == pytest.approx(wanted.sum())
    np.testing.assert_allclose(current.grad.numpy(), -0.5 * (np.minimum(ratios, 10) - 1), atol=1e-12)


def test_likelihood_counts_tokens_with_positive_advantage_only() -> None:
    data = example(4)
    tensor = torch.from_numpy(data["current"]).requires_grad_()
    loss, _ = negative_log_likelihood(tensor, tensors(data))
    loss.backward()
    weights = data["weight"] * (data["advantage"] > 0)
    assert loss.item() == pytest.approx(-(weights * data["current"]).sum())
    np.testing.assert_array_equal(tensor.grad.numpy(), -weights)


def test_metrics_count_the_tokens_that_a_teacher_scored_missed_and_moved_too_far() -> None:
    data = example(7)
    _, sums = make_objective(loss_config(), None, VERSION, TEACHER)(torch.from_numpy(data["current"]), tensors(data))
    counted, missing = data["weight"] > 0, np.isnan(data["teacher_logprobs"])
    ratio = (data["behaviour_logprobs"] - data["teacher_logprobs"])[counted & ~missing]
    far = np.abs(np.nan_to_num(data["teacher_logprobs"] - data["proximal_logprobs"])) > TEACHER_CLIP
    assert sums["teacher_missing"] == (counted & missing).sum() > 0
    assert sums["teacher_clipped"] == (counted & far).sum() > 0
    assert (sums["teacher_kl/count"], sums["teacher_kl/sum"].item()) == (len(ratio), pytest.approx(ratio.sum()))
    without = replace(tensors(data), teacher_logprobs=None)  # the loss is that of the rewards
    loss, sums = make_objective(loss_config(), None, VERSION, TEACHER)(torch.from_numpy(data["current"]), without)
    assert loss.item() == policy_loss(torch.from_numpy(data["current"]), without, loss_config())[0].item()
    assert (sums["teacher_missing"], sums["teacher_kl/count"]) == (counted.sum(), 0)
