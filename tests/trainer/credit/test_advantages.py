from __future__ import annotations

import numpy as np
import pytest

from megatron_webrl.trainer.credit.advantages import common_outcome, group_advantages, normalize
from megatron_webrl.types import Group
from tests.trajectories import trajectory


def test_advantages_have_mean_zero_and_deviation_one():
    values = np.concatenate(normalize([np.array([r]) for r in (1.0, 0.0, 0.0, 1.0, 0.0)]))
    assert values.mean() == pytest.approx(0.0, abs=1e-9)
    assert values.std() == pytest.approx(1.0, abs=1e-5)


def test_equal_rewards_have_no_advantage():
    assert np.abs(normalize([np.ones(1), np.ones(1), np.ones(3)])[2]).max() == 0.0


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_penalties_alone_give_no_advantage(reward: float):
    group = Group(0, tuple(trajectory(0, i, reward=reward) for i in range(8)))
    values = group_advantages(group, lambda t: t.reward - 0.001 * (t.index == 0))
    assert values == dict.fromkeys(range(8), 0.0)


def test_a_masked_episode_does_not_enter_its_groups_statistics():
    rewards = [1.0, 0.0, 0.0]
    plain = Group(0, tuple(trajectory(0, i, reward=r) for i, r in enumerate(rewards)))
    masked = Group(0, (*plain.trajectories, trajectory(0, 3, outcome="browser_error")))
    assert group_advantages(masked) == group_advantages(plain)


def test_a_group_of_masked_episodes_has_no_advantages():
    assert group_advantages(Group(0, (trajectory(0, 0, outcome="engine_error"),))) == {}


def test_penalties_change_the_statistics_of_a_group():
    group = Group(0, tuple(trajectory(0, i, reward=r) for i, r in enumerate((1.0, 1.0, 0.0))))
    values = group_advantages(group, lambda t: t.reward - 0.5 * (t.index == 0))
    rewards = np.array([0.5, 1.0, 0.0])
    assert list(values.values()) == pytest.approx(list((rewards - 0.5) / rewards.std()), rel=1e-4)


@pytest.mark.parametrize(
    ("outcomes", "name"),
    [
        (("success", "success"), "all_succeeded"),
        (("failure", "browser_error"), "all_failed"),
        (("failure", "success"), None),
        (("browser_error",), None),
    ],
)
def test_a_common_outcome_is_named(outcomes: tuple[str, ...], name: str | None):
    group = Group(0, tuple(trajectory(0, i, outcome=outcome) for i, outcome in enumerate(outcomes)))
    assert common_outcome(group) == name
