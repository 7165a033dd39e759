"""Advantages of steps against a computation from the definitions, step by step, and their properties."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.advantages import common_outcome, group_advantages, step_advantages
from megatron_webrl.trainer.credit.rewards import reward_function
from megatron_webrl.types import Group, Trajectory
from tests.trainer.credit.made_groups import LIMIT, WINDOW, plain_group, varied_groups

WEIGHTS = {"format_penalty": 0.3, "repetition_penalty": 0.2, "length_penalty": 0.5}


def with_settings(penalised: bool = False, **changed: Any) -> Config:
    config = Config()
    config.rollout.max_new_tokens, config.trainer.reward.length_window = LIMIT, WINDOW
    config.trainer.advantage = advantage_config(**changed)
    for name, weight in WEIGHTS.items() if penalised else ():
        setattr(config.trainer.reward, name, weight)
    return config


def step_shares(trajectory: Trajectory) -> list[list[float]]:
    """What each penalty counts, of format, repetition and length, at each step."""
    found: list[list[float]] = []
    before = None
    for step in trajectory.steps:
        repeated = before is not None and step.action is not None and step.action == before.action
        repeated = repeated and not before.page_changed
        used = max(0, len(step.response_token_ids) - (LIMIT - WINDOW))
        found.append([float(step.format_error is not None), float(repeated), used / WINDOW])
        before = step
    return found


def mean_over_episodes(values: list[list[float]]) -> float:
    return sum(sum(each) / len(each) for each in values) / len(values)


def deviation_about(values: list[list[float]], middle: float) -> float:
    return mean_over_episodes([[(v - middle) ** 2 for v in each] for each in values]) ** 0.5


def expected_summed(groups: list[Group], config: Config) -> list[dict[int, list[float]]]:
    """A_t = (G_t - b) / d, by loops over groups, episodes and steps; groups of one outcome have 0."""
    choice, weights = config.trainer.advantage, list(WEIGHTS.values())
    centred_of, deviation_of, own = {}, {}, {}
    for group in groups:
        trainable = [t for t in group.trajectories if t.trainable]
        returns = []
        for t in trainable:
            penalties = [sum(w * s for w, s in zip(weights, shares, strict=True)) for shares in step_shares(t)]
            if not config.trainer.reward.format_penalty:
                penalties = [0.0] * len(t.steps)
            own[group.ticket, t.index] = penalties if choice.penalties == "step" else [0.0] * len(t.steps)
            common = sum(penalties) / len(penalties) if choice.penalties == "trajectory" else 0.0
            left = range(len(t.steps) - 1, -1, -1)
            returns.append([t.reward * choice.discount**k - common for k in left])
        deviation_of[group.ticket] = deviation_about(returns, mean_over_episodes(returns))
        for place, t in enumerate(trainable):
            others = returns if choice.baseline == "group_mean" else returns[:place] + returns[place + 1 :]
            base = mean_over_episodes(others)
            centred_of[group.ticket, t.index] = [value - base for value in returns[place]]
    informative = {group.ticket for group in groups if common_outcome(group) is None}
    whole = deviation_about([v for (ticket, _), v in centred_of.items() if ticket in informative], 0.0)
    found: list[dict[int, list[float]]] = []
    for group in groups:
        divisor = {"group_std": deviation_of[group.ticket] + 1e-6, "batch_std": whole + 1e-6, "none": 1.0}[choice.scale]
        keys = [(group.ticket, t.index) for t in group.trajectories if t.trainable]
        found.append({
            key[1]: [
                (c - p) / divisor if group.ticket in informative else 0.0
                for c, p in zip(centred_of[key], own[key], strict=True)
            ]
            for key in keys
        })  # fmt: skip
    return found


def same(found: list[dict[int, np.ndarray]], expected: list[dict[int, list[float]]], case: str = "") -> None:
    assert [list(each) for each in found] == [list(each) for each in expected]
    for values, wanted in zip(found, expected, strict=True):
        for index, value in values.items():
            np.testing.assert_allclose(value, wanted[index], rtol=1e-9, atol=1e-12, err_msg=case)


def test_advantages_equal_those_of_the_definition() -> None:
    for seed in range(3):
        groups = varied_groups(seed)
        for baseline, scale, discount, (penalties, penalised) in product(
            ("group_mean", "leave_one_out"), ("group_std", "none", "batch_std"), (1.0, 0.8),
            (("trajectory", False), ("trajectory", True), ("step", True)),
        ):  # fmt: skip
            config = with_settings(penalised, baseline=baseline, scale=scale, penalties=penalties, discount=discount)
            expected = expected_summed(groups, config)
            assert any(abs(v) > 0.1 for values in expected for each in values.values() for v in each)
            same(
                step_advantages(groups, config), expected, str((seed, baseline, scale, discount, penalties, penalised))
            )


def test_components_are_normalised_separately_in_the_group_and_their_sum_in_the_batch() -> None:
    groups = varied_groups(5)
    for discount in (1.0, 0.8):
        config = with_settings(True, name="gdpo", discount=discount)
        sums: dict[tuple[int, int], list[float]] = {}
        for group in groups:
            trainable = [t for t in group.trajectories if t.trainable]
            outcomes = [[t.reward * discount**k for k in range(len(t.steps) - 1, -1, -1)] for t in trainable]
            parts = [(1.0, outcomes)]
            for number, weight in enumerate(WEIGHTS.values()):
                means = [sum(shares[number] for shares in step_shares(t)) / len(t.steps) for t in trainable]
                parts.append((weight, [[-m] * len(t.steps) for m, t in zip(means, trainable, strict=True)]))
            for place, t in enumerate(trainable):
                sums[group.ticket, t.index] = [
                    sum(
                        weight * (values[place][k] - mean_over_episodes(values))
                        / (deviation_about(values, mean_over_episodes(values)) + 1e-6)
                        for weight, values in parts
                    )
                    for k in range(len(t.steps))
                ]  # fmt: skip
        middle = mean_over_episodes(list(sums.values()))
        divisor = deviation_about(list(sums.values()), middle) + 1e-6
        found = step_advantages(groups, config)
        same(found, [
            {i: [(v - middle) / divisor for v in sums[group.ticket, i]] for i in values}
            for group, values in zip(groups, found, strict=True)
        ])  # fmt: skip
        assert max(abs(each).max() for each in found[-1].values()) > 0.01  # of failures alone: their penalties count


def test_the_weight_of_a_separate_penalty_counts_in_a_batch_of_failures_alone() -> None:
    (failures,) = varied_groups(5)[-1:]
    (found,), config = step_advantages([failures], with_settings(True, name="gdpo")), with_settings(True)
    for name in WEIGHTS:
        setattr(config.trainer.reward, name, 0.01 * WEIGHTS[name])
    config.trainer.advantage = advantage_config("gdpo")
    (smaller,) = step_advantages([failures], config)
    assert max(abs(each).max() for each in found.values()) > 0.01
    same([smaller], [{index: 0.01 * each for index, each in found.items()}])


def test_without_options_the_advantages_are_those_of_grpo_to_the_last_bit() -> None:
    groups = varied_groups(1)
    for penalised in (False, True):
        config = with_settings(penalised)
        plain = [group_advantages(group, reward_function(config)) for group in groups]
        found = step_advantages(groups, config)
        assert [{i: set(v.tolist()) for i, v in values.items()} for values in found] == [
            {i: {v} for i, v in values.items()} for values in plain
        ]


def test_a_penalty_is_borne_by_its_step_alone() -> None:
    groups = varied_groups(2)
    for scale in ("none", "group_std", "batch_std"):
        plain = step_advantages(groups, with_settings(scale=scale))
        found = step_advantages(groups, with_settings(True, scale=scale, penalties="step"))
        clean = guilty = 0
        for group, values, without in zip(groups[:-1], found, plain, strict=False):
            for t in group.trajectories:
                for k, shares in enumerate(step_shares(t) if t.trainable else ()):
                    if any(shares):
                        guilty += 1
                        assert values[t.index][k] < without[t.index][k]
                    else:
                        clean += 1
                        assert values[t.index][k] == without[t.index][k]
        assert min(clean, guilty) > 3


mixed_groups = st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=2, max_size=8).filter(
    lambda each: len({success for success, _ in each}) == 2
)


@settings(max_examples=60, derandomize=True)
@given(mixed_groups, st.sampled_from(["group_mean", "leave_one_out"]), st.floats(0.3, 1.0))
def test_the_mean_advantages_of_a_groups_episodes_add_up_to_zero(
    made: list[tuple[bool, int]], baseline: str, discount: float
) -> None:
    group = plain_group(*map(list, zip(*made, strict=True)))
    for scale in ("none", "group_std", "batch_std"):
        (found,) = step_advantages([group], with_settings(baseline=baseline, scale=scale, discount=discount))
        assert sum(each.mean() for each in found.values()) == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=40, derandomize=True)
@given(mixed_groups)
def test_leaving_one_out_scales_the_groups_advantages_up(made: list[tuple[bool, int]]) -> None:
    group, n = plain_group(*map(list, zip(*made, strict=True))), len(made)
    (mean,) = step_advantages([group], with_settings(scale="none"))
    (out,) = step_advantages([group], with_settings(scale="none", baseline="leave_one_out"))
    for index in mean:  # r - (sum - r) / (n - 1) = n / (n - 1) * (r - sum / n)
        np.testing.assert_allclose(out[index], mean[index] * n / (n - 1), rtol=1e-12)


@settings(max_examples=40, derandomize=True)
@given(st.lists(mixed_groups, min_size=1, max_size=4))
def test_a_batch_divided_by_its_deviation_has_the_deviation_one(made: list[list[tuple[bool, int]]]) -> None:
    groups = [plain_group(*map(list, zip(*each, strict=True)), ticket=t) for t, each in enumerate(made)]
    groups.append(plain_group([False] * 3, [2, 3, 4], ticket=99))  # without gradient: not in the deviation
    found = step_advantages(groups, with_settings(scale="batch_std"))
    squares = [float((value**2).mean()) for values in found[:-1] for value in values.values()]
    assert np.mean(squares) == pytest.approx(1.0, abs=1e-4)
    assert all(not value.any() for value in found[-1].values())


def test_a_group_of_one_outcome_has_no_gradient_whatever_the_options() -> None:
    masked_out = Group(1, tuple(t for t in varied_groups(0)[0].trajectories if not t.trainable))
    for outcome, changed in product((True, False), (
        {"discount": 0.5}, {"scale": "none", "discount": 0.5}, {"baseline": "leave_one_out"}, {"anchor_weight": 1.0},
        {"scale": "batch_std"}, {"penalties": "step"}, {"name": "gdpo", "discount": 0.5},
    )):  # fmt: skip
        group, config = plain_group([outcome] * 4, [1, 2, 3, 6]), with_settings("penalties" in changed, **changed)
        found, nothing = step_advantages([group, masked_out], config)
        assert [len(value) for value in found.values()] == [1, 2, 3, 6]
        assert all(not value.any() for value in found.values()), (outcome, changed)
        assert nothing == {}
