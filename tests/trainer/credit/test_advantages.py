"""Rewards, and advantages of steps, against a computation from the definitions, step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.advantages import (
    ANCHOR_DISCOUNT,
    anchor_advantages,
    common_outcome,
    group_advantages,
    is_overlong,
    step_advantages,
    steps_by_state,
)
from megatron_webrl.trainer.credit.rewards import configured_penalties, reward_function
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.metrics.group_statistics import credit_metrics
from megatron_webrl.trainer.multi_node.screenshots import strip_images
from megatron_webrl.types import Group, Trajectory
from tests.trainer.credit.made_groups import LIMIT, WINDOW, plain_group, varied_groups
from tests.trajectories import trajectory

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
    centred_of, deviation_of, mean_of, own = {}, {}, {}, {}
    for group in groups:
        trainable = [t for t in group.trajectories if t.trainable]
        returns, outcomes = [], []
        for t in trainable:
            penalties = [sum(w * s for w, s in zip(weights, shares, strict=True)) for shares in step_shares(t)]
            if not config.trainer.reward.format_penalty:
                penalties = [0.0] * len(t.steps)
            own[group.ticket, t.index] = penalties if choice.penalties == "step" else [0.0] * len(t.steps)
            common = sum(penalties) / len(penalties) if choice.penalties == "trajectory" else 0.0
            left, reward = range(len(t.steps) - 1, -1, -1), t.reward
            for _ in t.steps[1:]:
                reward *= config.trainer.reward.turn_discount
            outcomes.append([reward * choice.discount**k for k in left])
            returns.append([outcome - common for outcome in outcomes[-1]])
        mean_of[group.ticket] = mean_over_episodes(outcomes)
        deviation_of[group.ticket] = deviation_about(returns, mean_over_episodes(returns))
        for place, t in enumerate(trainable):
            others = returns if choice.baseline == "group_mean" else returns[:place] + returns[place + 1 :]
            base = mean_over_episodes(others)
            centred_of[group.ticket, t.index] = [value - base for value in returns[place]]
    informative = {group.ticket for group in groups if common_outcome(group) is None}
    whole = deviation_about([v for (ticket, _), v in centred_of.items() if ticket in informative], 0.0)
    found: list[dict[int, list[float]]] = []
    for group in groups:
        divisor = {
            "group_std": deviation_of[group.ticket] + 1e-6, "batch_std": whole + 1e-6, "none": 1.0,
            "group_mean": mean_of[group.ticket] + 1e-6,
        }[choice.scale]  # fmt: skip
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
            ("group_mean", "leave_one_out"), ("group_std", "none", "batch_std", "group_mean"), (1.0, 0.8),
            (("trajectory", False), ("trajectory", True), ("step", True)),
        ):  # fmt: skip
            config = with_settings(penalised, baseline=baseline, scale=scale, penalties=penalties, discount=discount)
            config.trainer.reward.turn_discount = (1.0, 0.9)[seed % 2]
            expected = expected_summed(groups, config)
            assert any(abs(v) > 0.1 for values in expected for each in values.values() for v in each)
            same(step_advantages(groups, config), expected, f"{seed}, {config.trainer.advantage}, {penalised}")


def test_divided_by_the_mean_a_success_weighs_more_the_rarer_it_is() -> None:
    """MaxRL: the gradient of log(pass rate) is the mean score of the successes, less a baseline."""
    for successes in (1, 2, 7):
        (found,) = step_advantages(
            [plain_group([i < successes for i in range(8)], [2] * 8)], with_settings(scale="group_mean")
        )
        assert [each[0] for each in found.values()] == pytest.approx(
            [(8 - successes) / successes] * successes + [-1.0] * (8 - successes), rel=1e-4
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


def test_the_advantages_of_groups_are_those_of_steps_without_options_to_the_last_bit() -> None:
    assert not configured_penalties(Config())  # off unless asked for
    groups = varied_groups(1)
    for penalised in (False, True):
        config = with_settings(penalised)
        for group, values in zip(groups, step_advantages(groups, config), strict=True):
            plain = group_advantages(group, reward_function(config))
            assert {i: {*value.tolist()} for i, value in values.items()} == {i: {v} for i, v in plain.items()}
    assert group_advantages(Group(0, (trajectory(outcome="engine_error"),))) == {}


def test_a_common_outcome_is_named() -> None:
    for outcomes, name in (
        (("success", "success"), "all_succeeded"),
        (("failure", "browser_error"), "all_failed"),
        (("failure", "success"), None),
        (("browser_error",), None),
    ):
        group = Group(0, tuple(trajectory(0, i, outcome=outcome) for i, outcome in enumerate(outcomes)))
        assert common_outcome(group) == name, outcomes


def test_a_group_of_failures_with_different_credit_has_a_gradient() -> None:
    failures = plain_group([False] * 3, [2, 3, 1])
    rewards = [0.0, 0.5, 0.25]
    members = [replace(t, reward=reward) for t, reward in zip(failures.trajectories, rewards, strict=True)]
    assert common_outcome(failures) == "all_failed"
    assert common_outcome(Group(0, tuple(members))) is None
    (found,) = step_advantages([Group(0, tuple(members))], with_settings())
    expected = [(reward - 0.25) / (np.std(rewards) + 1e-6) for reward in rewards]
    assert [each[0] for each in found.values()] == pytest.approx(expected)
    assert common_outcome(Group(0, tuple(replace(t, reward=0.5) for t in members))) == "all_failed"


def test_a_group_of_one_outcome_has_no_gradient_whatever_the_options() -> None:
    masked_out = Group(1, tuple(t for t in varied_groups(0)[0].trajectories if not t.trainable))
    for outcome, changed in product((True, False), (
        {"discount": 0.5}, {"scale": "none", "discount": 0.5}, {"baseline": "leave_one_out"}, {"anchor_weight": 1.0},
        {"scale": "batch_std"}, {"penalties": "step"}, {"name": "gdpo", "discount": 0.5},
    )):  # fmt: skip
        group, config = plain_group([outcome] * 4, [1, 2, 3, 6]), with_settings("penalties" in changed, **changed)
        config.trainer.reward.turn_discount = 0.9
        found, nothing = step_advantages([group, masked_out], config)
        assert [len(value) for value in found.values()] == [1, 2, 3, 6]
        assert all(not value.any() for value in found.values()), (outcome, changed)
        assert nothing == {}


PAGES = {"a": b"page a", "b": b"page b", "c": b"page c"}


def visits(index: int, pages: str, *, success: bool) -> Trajectory:
    """An episode that acts on pages of these names; each prompt shows all pages so far."""
    plain = trajectory(0, index, reward=float(success), steps=len(pages))
    steps = tuple(
        replace(step, url="http://shop.localhost/", images=np.arange(number + 1, dtype=np.int32),
                image_grids=np.ones((number + 1, 3), np.int32))
        for number, step in enumerate(plain.steps)
    )  # fmt: skip
    return replace(plain, steps=steps, images=tuple(PAGES[page] for page in pages))


def test_a_state_is_the_latest_screenshot_at_its_url() -> None:
    one, two = visits(0, "ab", success=True), visits(1, "bb", success=False)
    elsewhere = replace(two, index=2, steps=tuple(replace(step, url="http://wiki.localhost/") for step in two.steps))
    blind = trajectory(0, 3, steps=2)
    found = sorted(steps_by_state([one, two, elsewhere, blind]).values())
    assert found == [[(0, 0)], [(0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)]]
    assert sorted(steps_by_state([*map(strip_images, (one, two, elsewhere, blind))]).values()) == found
    group = Group(0, (visits(0, "abc", success=True), visits(1, "ab", success=False), trajectory(0, 2, outcome="x")))
    settings = advantage_config(anchor_weight=1.0)
    assert credit_metrics([group], settings) == {"anchored_step_rate": pytest.approx(4 / 5)}
    assert credit_metrics([group], advantage_config()) == {}


def test_anchor_advantages_equal_those_of_the_definition() -> None:
    for group, divide in product(varied_groups(3), (True, False)):
        members = [t for t in group.trajectories if t.trainable]
        found = anchor_advantages(members, 0.9, divide)
        compared = 0
        steps = [(i, k, t, step) for i, t in enumerate(members) for k, step in enumerate(t.steps)]
        for i, k, own, acted in steps:
            alike = [
                t.reward * 0.9 ** (len(t.steps) - 1 - number)
                for _, number, t, step in steps
                if step.url == acted.url and t.images[step.images[-1]] == own.images[acted.images[-1]]
            ]
            compared += len(alike) > 1
            value = own.reward * 0.9 ** (len(own.steps) - 1 - k)
            scale = float(np.std(alike)) + 1e-6 if divide else 1.0
            wanted = (value - sum(alike) / len(alike)) / scale
            assert found[i][k] == pytest.approx(wanted, abs=1e-9), (group.ticket, divide, i, k)
        assert compared > 2


def test_anchor_advantages_are_added_with_their_weight_to_those_of_the_episodes() -> None:
    groups = varied_groups(4)
    for scale in ("group_std", "none"):
        plain = step_advantages(groups, with_settings(scale=scale))
        found = step_advantages(groups, with_settings(scale=scale, anchor_weight=0.7))
        for group, values, without in zip(groups[:-1], found, plain, strict=False):
            members = [t for t in group.trajectories if t.trainable]
            anchors = anchor_advantages(members, ANCHOR_DISCOUNT, scale == "group_std")
            for t, anchor in zip(members, anchors, strict=True):
                np.testing.assert_allclose(values[t.index], without[t.index] + 0.7 * anchor, rtol=1e-12)
    # Successes alone are not compared by their lengths.
    members = visits(0, "abc", success=True), visits(1, "ab", success=True)
    assert any(value.any() for value in anchor_advantages(members, 0.95, divide=True))
    (values,) = step_advantages([Group(0, members)], with_settings(anchor_weight=1.0))
    assert not any(value.any() for value in values.values())


def ended(index: int, success: bool = False, end: str = "done", cut: bool = False) -> Trajectory:
    made = trajectory(0, index, reward=float(success), steps=3)
    first = replace(made.steps[0], finish_reason="length" if cut else "stop")
    return replace(made, end_reason=end, steps=(first, *made.steps[1:]))


def test_overlong_failures_leave_the_loss_and_stay_in_the_statistics() -> None:
    for success, end, cut, overlong in (
        (False, "steps_exhausted", False, True),
        (False, "done", True, True),
        (False, "done", False, False),  # it failed by itself
        (False, "go_backs", False, False),
        (True, "steps_exhausted", True, False),
    ):
        made = ended(0, success, end, cut)
        assert is_overlong(made) is overlong, (success, end, cut)
        assert not is_overlong(replace(made, outcome="browser_error"))
    group = Group(0, (ended(0, True), ended(1), ended(2, end="steps_exhausted"), ended(3, cut=True)))
    kept, config = step_advantages([group], Config())[0], with_settings(overlong="mask")
    (masked,) = step_advantages([group], config)
    assert list(masked) == [0, 1]
    assert all((masked[index] == kept[index]).all() for index in masked)
    assert {s.trajectory_id for s in batching.training_samples([group], config, 0)} == {(0, 0), (0, 1)}
    assert credit_metrics([group], config.trainer.advantage) == {"overlong_masked_rate": 0.5}
