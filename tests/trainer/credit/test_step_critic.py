"""Advantages of a step critic against an independent computation, and the value loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.advantages import step_advantages
from megatron_webrl.trainer.credit.step_critic import critic_credit, generalized_advantages
from megatron_webrl.trainer.loss.objective import make_objective, value_loss
from megatron_webrl.trainer.loss.token_data import StepValues
from megatron_webrl.types import Group
from tests.trainer.credit.made_groups import plain_group, varied_groups
from tests.trainer.credit.test_advantages import WEIGHTS, step_shares, with_settings
from tests.trainer.loss.by_hand import example, tensors

numbers = st.floats(-2, 2)
episodes = st.integers(1, 7).flatmap(
    lambda n: st.tuples(st.lists(numbers, min_size=n, max_size=n), st.lists(numbers, min_size=n, max_size=n))
)
fractions = st.floats(0.0, 1.0)


def by_definition(rewards: list[float], values: list[float], discount: float, gae_lambda: float) -> list[float]:
    """(1 - lambda) * sum over n of lambda^(n-1) * (n-step advantage), arXiv 1506.02438, eq. 11 to 16."""
    steps, found = len(values), []
    for t in range(steps):
        total = 0.0
        for n in range(1, steps - t + 1):
            n_step = sum(discount**k * rewards[t + k] for k in range(n)) - values[t]
            if t + n < steps:
                n_step += discount**n * values[t + n]
                total += (1 - gae_lambda) * gae_lambda ** (n - 1) * n_step
            else:  # all longer ones are the same
                total += gae_lambda ** (n - 1) * n_step
        found.append(total)
    return found


@settings(max_examples=100, derandomize=True)
@given(episodes, fractions, fractions)
def test_advantages_are_the_weighted_mean_of_those_of_n_steps(
    episode: tuple[list[float], list[float]], discount: float, gae_lambda: float
) -> None:
    rewards, values = map(np.array, episode)
    found = generalized_advantages(rewards, values, discount, gae_lambda)
    np.testing.assert_allclose(found, by_definition(*episode, discount, gae_lambda), atol=1e-12)


def with_critic(penalised: bool = False, **changed: Any) -> Config:
    settings = {"name": "critic", "scale": "none", "coefficient": 1.0, "gae_lambda": 0.9}
    return with_settings(penalised, **settings | changed)


def drawn_values(groups: list[Group], seed: int = 0) -> dict[tuple[int, int, int], float]:
    rng = np.random.default_rng(seed)
    members = [t for group in groups for t in group.trajectories if t.trainable]
    return {(t.ticket, t.index, k): float(rng.normal(0.5, 0.3)) for t in members for k in range(len(t.steps))}


def test_the_credit_of_a_batch_equals_that_of_the_definition() -> None:
    groups = varied_groups(3)  # the last group has failures alone
    values = drawn_values(groups)
    for penalties, scale in product(("", "trajectory", "step"), ("none", "batch_std")):
        config = with_critic(bool(penalties), scale=scale, discount=0.8, penalties=penalties or "trajectory")
        config.trainer.reward.turn_discount = 0.9
        credit = critic_credit(groups, values, config)
        assert credit.advantages.keys() == credit.targets.keys() == values.keys()
        numerators: dict[tuple[int, int], list[float]] = {}
        for t in (t for group in groups for t in group.trajectories if t.trainable):
            own = [sum(w * s for w, s in zip(WEIGHTS.values(), each, strict=True)) for each in step_shares(t)]
            common = sum(own) / len(own) if penalties == "trajectory" else 0.0
            own = own if penalties == "step" else [0.0] * len(own)
            predicted = [values[t.ticket, t.index, k] for k in range(len(own))]
            gae = by_definition(
                [0.0] * (len(own) - 1) + [t.reward * 0.9 ** (len(own) - 1) - common], predicted, 0.8, 0.9
            )
            targets = [credit.targets[t.ticket, t.index, k] for k in range(len(own))]
            np.testing.assert_allclose(targets, np.add(gae, predicted), atol=1e-12, err_msg=penalties)
            numerators[t.ticket, t.index] = [a - p for a, p in zip(gae, own, strict=True)]
        squares = [sum(a * a for a in each) / len(each) for each in numerators.values()]
        divisor = (sum(squares) / len(squares)) ** 0.5 + 1e-6 if scale == "batch_std" else 1.0
        for (ticket, index), each in numerators.items():
            found = [credit.advantages[ticket, index, k] for k in range(len(each))]
            np.testing.assert_allclose(found, np.array(each) / divisor, atol=1e-12, err_msg=f"{penalties}, {scale}")
        assert any(abs(credit.advantages[step]) > 0.01 for step in values if step[0] == groups[-1].ticket)


def test_steps_without_a_value_are_passed_over() -> None:
    group = plain_group([True, False], [3, 2])
    values = {(0, 0, 0): 0.2, (0, 0, 2): 0.6}  # the step between has no response, the other episode is masked
    credit = critic_credit([group], values, with_critic(discount=0.5))
    shorter = generalized_advantages(np.array([0.0, 1.0]), np.array([0.2, 0.6]), 0.5, 0.9)
    assert [*credit.advantages] == [*values]
    np.testing.assert_allclose([*credit.advantages.values()], shorter)
    assert critic_credit([group], {}, with_critic(scale="batch_std")).advantages == {}


def test_the_explained_variance_compares_values_with_returns() -> None:
    group = plain_group([True, False], [2, 2])  # discounted returns: 0.5, 1, 0, 0
    returns = {(0, 0, 0): 0.5, (0, 0, 1): 1.0, (0, 1, 0): 0.0, (0, 1, 1): 0.0}
    config = with_critic(discount=0.5)
    perfect = critic_credit([group], returns, config).metrics
    assert perfect == {"value_mean": pytest.approx(0.375), "explained_variance": pytest.approx(1.0)}
    constant = critic_credit([group], dict.fromkeys(returns, 0.3), config).metrics
    assert constant["explained_variance"] == pytest.approx(0.0)
    alike = critic_credit([plain_group([False] * 2, [2, 2])], returns, config).metrics
    assert alike == {"value_mean": pytest.approx(0.375)}


def test_with_a_critic_each_trainable_episode_waits_for_its_values() -> None:
    groups = varied_groups(1)
    for changed, left_out in (({}, 0), ({"overlong": "mask"}, 1)):
        found = step_advantages(groups, with_critic(**changed))
        kept = sum(len(each) for each in found)
        everyone = sum(t.trainable for group in groups for t in group.trajectories)
        assert (kept < everyone) == bool(left_out)
        assert all(not value.any() for each in found for value in each.values())


def test_the_objective_adds_the_value_loss_of_the_definition_with_its_coefficient() -> None:
    predicted, current = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_(), example(4)["current"]
    targets, weight = (torch.from_numpy(np.random.default_rng(seed).random(6)) for seed in (0, 1))
    data = replace(tensors(example(4)), values=StepValues(predicted, targets, weight))
    loss = value_loss(data)
    loss.backward()
    difference = predicted.detach() - targets
    assert loss.item() == pytest.approx((weight * difference**2).sum().item(), rel=1e-12)
    torch.testing.assert_close(predicted.grad, 2 * weight * difference)
    plain, sums = make_objective(loss_config(), None)(torch.from_numpy(current), data)
    critic = advantage_config("critic", coefficient=0.7)
    both, more = make_objective(loss_config(), None, critic=critic)(torch.from_numpy(current), data)
    assert both.item() == pytest.approx(plain.item() + 0.7 * loss.item())
    assert more.keys() - sums.keys() == {"value_loss"}
