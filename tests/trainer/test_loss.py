"""The losses against an independent NumPy computation, and their gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_webrl.config import LossConfig
from megatron_webrl.trainer.loss import BatchSize, TokenData, decoupled_surrogate, likelihood, token_weight

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, behaviour_cap=5.0)


def example(seed: int, tokens: int = 200) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    proximal = -rng.random(tokens) * 3
    data = {
        "behaviour": proximal + rng.normal(0, 1.0, tokens),
        "proximal": proximal,
        "advantage": rng.normal(0, 1, tokens),
        "weight": rng.random(tokens) * (rng.random(tokens) > 0.1),
    }
    return proximal + rng.normal(0, 0.8, tokens), data


def tensors(data: dict[str, np.ndarray]) -> TokenData:
    return TokenData(**{name: torch.from_numpy(value) for name, value in data.items()})


def by_hand(current: np.ndarray, data: dict[str, np.ndarray]) -> float:
    total = 0.0
    for now, behaviour, proximal, advantage, weight in zip(current, *data.values(), strict=True):
        behaviour_weight = np.exp(proximal - behaviour)
        if behaviour_weight > CONFIG.behaviour_cap:
            continue
        ratio = np.exp(now - proximal)
        value = min(ratio * advantage, min(max(ratio, 1 - CONFIG.clip_low), 1 + CONFIG.clip_high) * advantage)
        if advantage < 0:
            value = max(value, CONFIG.dual_clip * advantage)
        total -= weight * behaviour_weight * value
    return total


@pytest.mark.parametrize("seed", range(5))
def test_the_decoupled_surrogate_equals_a_computation_by_hand(seed: int):
    current, data = example(seed)
    loss, sums = decoupled_surrogate(torch.from_numpy(current), tensors(data), CONFIG)
    assert loss.item() == pytest.approx(by_hand(current, data), rel=1e-10)
    capped = (np.exp(data["proximal"] - data["behaviour"]) > CONFIG.behaviour_cap) & (data["weight"] > 0)
    assert sums["capped"].item() == capped.sum() > 0
    assert sums["clipped"].item() > 0
    assert sums["dual_clipped"].item() > 0


@pytest.mark.parametrize("name", ["decoupled", "likelihood"])
def test_gradients_equal_finite_differences(name: str):
    current, data = example(7, tokens=40)

    def loss(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return (
            likelihood(tensor, tensors(data))
            if name == "likelihood"
            else decoupled_surrogate(tensor, tensors(data), CONFIG)
        )[0]

    tensor = torch.from_numpy(current).requires_grad_()
    value, _ = (
        likelihood(tensor, tensors(data))
        if name == "likelihood"
        else decoupled_surrogate(tensor, tensors(data), CONFIG)
    )
    value.backward()
    step = 1e-6
    for i in range(len(current)):
        bumped = [current + sign * step * (np.arange(len(current)) == i) for sign in (1, -1)]
        slope = (loss(bumped[0]) - loss(bumped[1])) / (2 * step)
        assert tensor.grad[i].item() == pytest.approx(slope.item(), abs=1e-5)


def test_on_policy_the_gradient_is_that_of_the_policy_gradient():
    current, data = example(3)
    data["behaviour"] = data["proximal"] = current
    tensor = torch.from_numpy(current).requires_grad_()
    decoupled_surrogate(tensor, tensors(data), CONFIG)[0].backward()
    np.testing.assert_allclose(tensor.grad.numpy(), -data["weight"] * data["advantage"], rtol=1e-12)


def test_likelihood_ignores_tokens_without_positive_advantage():
    current, data = example(4)
    data["advantage"] = np.where(data["advantage"] > 0, 1.0, 0.0)
    loss, _ = likelihood(torch.from_numpy(current), tensors(data))
    assert loss.item() == pytest.approx(-(data["weight"] * data["advantage"] * current).sum())


def test_normalisers_weigh_trajectories_as_their_equations_say():
    size = BatchSize(trajectories=4, tokens=200)
    assert token_weight("constant", size, steps=12, k=10) == pytest.approx(1 / 40)
    assert token_weight("per_trajectory", size, steps=12, k=10) == pytest.approx(1 / 48)
    assert token_weight("token_mean", size, steps=12, k=10) == pytest.approx(1 / 200)
    with pytest.raises(ValueError, match="sum"):
        token_weight("sum", size, steps=1, k=1)
