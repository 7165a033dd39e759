from __future__ import annotations

import numpy as np
import pytest

from megatron_webrl.trainer.credit.advantages import common_outcome, group_advantages, normalize
from megatron_webrl.types import Group, Trajectory
from tests.trajectories import trajectory


def group_of(rewards: list[float], *masked: str) -> Group:
    members = [trajectory(0, i, reward=reward) for i, reward in enumerate(rewards)]
    return Group(0, (*members, *(trajectory(0, len(rewards), outcome=outcome) for outcome in masked)))


def first_penalised(trajectory: Trajectory) -> float:
    return trajectory.reward - 0.5 * (trajectory.index == 0)


def test_advantages_have_mean_zero_and_deviation_one():
    values = np.concatenate(normalize([np.array([r]) for r in (1.0, 0.0, 0.0, 1.0, 0.0)]))
    assert values.mean() == pytest.approx(0.0, abs=1e-9)
    assert values.std() == pytest.approx(1.0, abs=1e-5)
    assert np.abs(normalize([np.ones(1), np.ones(1), np.ones(3)])[2]).max() == 0.0


def test_penalties_change_the_statistics_of_a_group_and_masked_episodes_do_not():
    rewards = np.array([0.5, 1.0, 0.0])
    values = group_advantages(group_of([1.0, 1.0, 0.0]), first_penalised)
    assert list(values.values()) == pytest.approx(list((rewards - 0.5) / rewards.std()), rel=1e-4)
    assert group_advantages(group_of([1.0, 1.0, 0.0], "browser_error"), first_penalised) == values
    assert group_advantages(group_of([], "engine_error")) == {}
    for reward in (0.0, 1.0):  # penalties alone
        assert group_advantages(group_of([reward] * 8), first_penalised) == dict.fromkeys(range(8), 0.0)


def test_a_common_outcome_is_named():
    for outcomes, name in (
        (("success", "success"), "all_succeeded"),
        (("failure", "browser_error"), "all_failed"),
        (("failure", "success"), None),
        (("browser_error",), None),
    ):
        group = Group(0, tuple(trajectory(0, i, outcome=outcome) for i, outcome in enumerate(outcomes)))
        assert common_outcome(group) == name, outcomes
