"""The losses against an independent NumPy computation, and their gradients against finite differences of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from megatron_webrl.config.loss import LossConfig
from megatron_webrl.trainer.loss.normalizers import MinibatchTotals, token_weight
from megatron_webrl.trainer.loss.objective import (
    clipped_surrogate,
    make_objective,
    negative_log_likelihood,
    reference_kl,
)
from megatron_webrl.trainer.loss.token_data import TokenData
from megatron_webrl.trainer.metrics.moments import is_extreme

USUAL = LossConfig(clip_low=0.2, clip_high=0.28, importance_weight_cap=2.0)
VARIANTS = [
    replace(
        USUAL, name=name, decoupled=mode != "", importance_weight_mode=mode or "mask", dual_clip=dual, kl_coefficient=kl
    )
    for name, mode, dual, kl in product(("grpo", "gspo"), ("mask", "truncate", ""), (0.0, 1.5), (0.0, 0.7))
]
ARRAYS = (
    "behaviour_logprobs",
    "proximal_logprobs",
    "advantage",
    "weight",
    "step_index",
    "step_lengths",
    "reference_logprobs",
)


def title(config: LossConfig) -> str:
    kind = f"{config.importance_weight_mode}" if config.decoupled else "coupled"
    return f"{config.name}-{kind}-dual{config.dual_clip}-kl{config.kl_coefficient}"


def example(seed: int, lengths: tuple[int, ...] = (9, 1, 14, 6, 3, 20)) -> dict[str, np.ndarray]:
    """Responses of `lengths` tokens; advantage and weight are a response's, one in five weighs nothing."""
    rng = np.random.default_rng(seed)
    step, tokens = np.repeat(np.arange(len(lengths)), lengths), sum(lengths)
    proximal = -rng.random(tokens) * 3
    weight = rng.random(len(lengths)) * (rng.random(len(lengths)) > 0.2)
    return {
        "proximal_logprobs": proximal,
        "behaviour_logprobs": proximal + rng.normal(0, 0.6, tokens) + rng.normal(0, 0.6, len(lengths))[step],
        "reference_logprobs": proximal + rng.normal(0, 0.5, tokens),
        "current": proximal + rng.normal(0, 0.5, tokens) + rng.normal(0, 0.5, len(lengths))[step],
        "advantage": rng.normal(0, 1, len(lengths))[step],
        "weight": weight[step],
        "step_index": step,
        "step_lengths": np.array(lengths, float),
    }


def tensors(data: dict[str, np.ndarray]) -> TokenData:
    return TokenData(**{name: torch.from_numpy(data[name]) for name in ARRAYS})


def clipped(advantage: float, ratio: float, config: LossConfig) -> float:
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    value = min(ratio * advantage, bounded * advantage)
    return max(value, config.dual_clip * advantage) if advantage < 0 and config.dual_clip else value


def correction(ratio: float, config: LossConfig) -> float:
    if not config.decoupled:
        return 1.0
    if ratio > config.importance_weight_cap:
        return 0.0 if config.importance_weight_mode == "mask" else config.importance_weight_cap
    return ratio


def by_hand(current: np.ndarray, data: dict[str, np.ndarray], config: LossConfig) -> float:
    """grpo: a sum over tokens; gspo: a sum over responses, as their papers write them."""
    old = data["proximal_logprobs"] if config.decoupled else data["behaviour_logprobs"]
    total = 0.0
    for response in range(len(data["step_lengths"])):
        tokens = [t for t in range(len(current)) if data["step_index"][t] == response]
        if config.name == "gspo":
            ratio = math.prod(math.exp(current[t] - old[t]) for t in tokens) ** (1 / len(tokens))
            off = math.prod(math.exp(data["proximal_logprobs"][t] - data["behaviour_logprobs"][t]) for t in tokens) ** (
                1 / len(tokens)
            )
            advantage, weight = data["advantage"][tokens[0]], data["weight"][tokens[0]]
            total -= len(tokens) * weight * correction(off, config) * clipped(advantage, ratio, config)
        else:
            for t in tokens:
                off = math.exp(data["proximal_logprobs"][t] - data["behaviour_logprobs"][t])
                value = clipped(data["advantage"][t], math.exp(current[t] - old[t]), config)
                total -= data["weight"][t] * correction(off, config) * value
        for t in tokens:
            back = math.exp(data["reference_logprobs"][t]) / math.exp(current[t])
            total += config.kl_coefficient * data["weight"][t] * (back - math.log(back) - 1)
    return total


@pytest.mark.parametrize("config", VARIANTS, ids=title)
def test_every_loss_equals_a_computation_by_hand(config: LossConfig) -> None:
    for seed in range(5):
        data = example(seed)
        loss, _ = make_objective(config, None)(torch.from_numpy(data["current"]), tensors(data))
        assert loss.item() == pytest.approx(by_hand(data["current"], data, config), rel=1e-9)


@pytest.mark.parametrize("config", VARIANTS, ids=title)
def test_gradients_at_the_logits_equal_finite_differences(config: LossConfig) -> None:
    data = example(11, (4, 1, 5))
    rng = np.random.default_rng(5)
    logits, targets = rng.normal(0, 1.5, (10, 4)), rng.integers(0, 4, 10)
    logits[np.arange(10), targets] += 1.0
    places = np.arange(10)

    def chosen(values: np.ndarray) -> np.ndarray:
        return values[places, targets] - np.log(np.exp(values).sum(axis=1))

    near = chosen(logits) - data["current"]  # keep the ratios where the example has them
    data |= {name: data[name] + near for name in ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs")}
    tensor = torch.from_numpy(logits).requires_grad_()
    logprobs = torch.log_softmax(tensor, dim=1)[places, targets]
    make_objective(config, None)(logprobs, tensors(data))[0].backward()
    step = 1e-6
    for place in np.ndindex(*logits.shape):
        values = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[place] += sign * step
            values.append(by_hand(chosen(moved), data, config))
        assert tensor.grad[place].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-6)
    assert float(tensor.grad.abs().max()) > 0.01


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("mode", ["mask", "truncate"])
def test_metrics_count_what_the_equations_say(name: str, mode: str) -> None:
    config = replace(USUAL, name=name, importance_weight_mode=mode, dual_clip=1.5, importance_weight_cap=1.5)
    data = example(2, (8, 3, 11, 5, 7, 2, 9, 4) * 8)
    _, sums = clipped_surrogate(torch.from_numpy(data["current"]), tensors(data), config)
    wanted = dict.fromkeys(
        (
            "clipped",
            "dual_clipped",
            "importance_weight_capped",
            "policy_ratio",
            "behaviour_importance_weight",
            "approx_kl",
        ),
        0.0,
    )
    for t in range(len(data["current"])):
        if data["weight"][t] == 0:
            continue
        same = (
            data["step_index"] == data["step_index"][t] if name == "gspo" else np.arange(len(data["step_index"])) == t
        )
        moved = data["current"] - data["proximal_logprobs"]
        ratio = np.exp(moved[same].mean())
        off = np.exp((data["proximal_logprobs"] - data["behaviour_logprobs"])[same].mean())
        advantage, used = data["advantage"][t], correction(off, config)
        wanted["importance_weight_capped"] += off > config.importance_weight_cap
        wanted["behaviour_importance_weight"] += used
        wanted["policy_ratio"] += ratio
        wanted["approx_kl"] += np.exp(moved[t]) - 1 - moved[t]
        if used > 0:
            wanted["clipped"] += (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
            wanted["dual_clipped"] += advantage < 0 and ratio > 1.5
    figures = {key: value.item() for key, value in sums.items()}
    assert {key: figures[key] for key in wanted} == pytest.approx(wanted)
    assert all(value > 0 for value in wanted.values())
    assert figures["clipped_logprob/count"] == figures["clipped"]
    assert set(figures) - set(wanted) == {f"clipped_logprob/{key}" for key in ("count", "sum", "squares", "min", "max")}


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(name: str) -> None:
    data = example(3)
    data["behaviour_logprobs"] = data["proximal_logprobs"] = data["current"]
    tensor = torch.from_numpy(data["current"]).requires_grad_()
    clipped_surrogate(tensor, tensors(data), replace(USUAL, name=name))[0].backward()
    np.testing.assert_allclose(tensor.grad.numpy(), -data["weight"] * data["advantage"], rtol=1e-12)


def test_without_decoupling_fresh_tokens_give_the_same_loss() -> None:
    data = example(4)
    data["behaviour_logprobs"] = data["proximal_logprobs"]
    current = torch.from_numpy(data["current"])
    with_it, without = (clipped_surrogate(current, tensors(data), replace(USUAL, decoupled=d)) for d in (True, False))
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
    return tensor, TokenData(**data, step_index=torch.zeros(1, dtype=torch.int64), step_lengths=torch.ones(1))


@pytest.mark.parametrize("config", VARIANTS, ids=title)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("far", [150.0, -150.0])
def test_an_extreme_ratio_keeps_loss_and_gradient_finite(config: LossConfig, advantage: float, far: float) -> None:
    for moved in ({}, {"behaviour_logprobs": -1.0 - far}, {"reference_logprobs": -1.0 + far}):
        tensor, data = single(-1.0 + (far if not moved else 0.1), advantage=advantage, **moved)
        loss, sums = make_objective(config, None)(tensor, data)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(tensor.grad).all()
        assert all(torch.isfinite(value) for name, value in sums.items() if not is_extreme(name))


@pytest.mark.parametrize("config", VARIANTS, ids=title)
def test_tokens_without_weight_or_advantage_have_no_gradient(config: LossConfig) -> None:
    data = example(6)
    config = replace(config, kl_coefficient=0.0)
    for name in ("weight", "advantage"):
        nothing = tensors(data | {name: np.zeros_like(data[name])})
        tensor = torch.from_numpy(data["current"]).requires_grad_()
        loss, sums = make_objective(config, None)(tensor, nothing)
        loss.backward()
        assert loss.item() == 0
        assert not tensor.grad.any()
        assert sums["clipped"].item() == sums["dual_clipped"].item() == 0


@pytest.mark.parametrize("config", [v for v in VARIANTS if v.kl_coefficient], ids=title)
@pytest.mark.parametrize(
    "where", ["behaviour_logprobs", "proximal_logprobs", "advantage", "weight", "reference_logprobs"]
)
def test_nan_reaches_the_gradient(config: LossConfig, where: str) -> None:
    """The optimiser refuses such a gradient; a loss that ignored the token would hide it."""
    if where == "proximal_logprobs" and not config.decoupled:
        return  # it is not looked at
    tensor, data = single(-1.1, **{where: math.nan})
    make_objective(config, None)(tensor, data)[0].backward()
    assert torch.isnan(tensor.grad).all()


def test_a_penalty_without_a_reference_is_refused() -> None:
    data = replace(tensors(example(0)), reference_logprobs=None)
    with pytest.raises(ValueError, match=r"Learner\.reference is None"):
        make_objective(replace(USUAL, kl_coefficient=0.1), None)(data.proximal_logprobs, data)


def test_the_reference_divergence_is_the_expectation_of_its_estimate() -> None:
    """Over all tokens of a small vocabulary, weighted by the policy, k3 adds up to the divergence itself."""
    rng = np.random.default_rng(0)
    now, start = (values - np.log(np.exp(values).sum()) for values in rng.normal(0, 1, (2, 50)))
    data = example(0, (50,)) | {"weight": np.exp(now), "reference_logprobs": start}
    value, _ = reference_kl(torch.from_numpy(now), tensors(data))
    assert value.item() == pytest.approx((np.exp(now) * (now - start)).sum(), rel=1e-9)


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


def test_normalizers_weigh_trajectories_by_their_equations() -> None:
    size = MinibatchTotals(trajectories=4, tokens=200)
    assert token_weight("constant", size, steps=12, constant_steps=10) == pytest.approx(1 / 40)
    assert token_weight("per_trajectory", size, steps=12, constant_steps=10) == pytest.approx(1 / 48)
    assert token_weight("token_mean", size, steps=12, constant_steps=10) == pytest.approx(1 / 200)
    with pytest.raises(ValueError, match="sum"):
        token_weight("sum", size, steps=1, constant_steps=1)
