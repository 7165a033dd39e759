"""Metrics of complete groups, computed again from hand-made groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_webrl.trainer.credit.rewards import outcome_reward
from megatron_webrl.trainer.metrics.group_statistics import GroupStatistics
from megatron_webrl.types import Group
from tests.trajectories import trajectory

Episode = tuple[str, int]  # outcome, steps


def group(ticket: int, *episodes: Episode, difficulty: str = "easy", environment: str = "click-test") -> Group:
    made = [
        trajectory(ticket, index, reward=float(outcome == "success"), outcome=outcome, steps=steps,
                   group_size=len(episodes))
        for index, (outcome, steps) in enumerate(episodes)
    ]  # fmt: skip
    task = replace(made[0].task, difficulty=difficulty, environment=environment)
    return Group(ticket, tuple(replace(each, task=task) for each in made))


GROUPS = [
    group(0, ("success", 4), ("failure", 10), ("success", 9), ("failure", 10)),
    group(1, ("failure", 20), ("failure", 3), ("blocked", 2), ("failure", 20), difficulty="hard"),
    group(2, ("browser_crashed", 1), ("engine_error", 0), ("judge_error", 5), ("aborted", 2), difficulty="hard"),
    group(3, ("success", 5), ("success", 50), ("success", 51), ("context_overflow", 7), difficulty="medium"),
    group(4, ("success", 0), ("failure", 2), ("failure", 2), ("failure", 2)),  # the success has no tokens
]
ALL = [episode for each in GROUPS for episode in each.trajectories]


def metrics_of(groups: list[Group]) -> dict[str, float]:
    statistics = GroupStatistics(outcome_reward)
    for each in groups:
        statistics.add(each)
    return statistics.pop_metrics()


def chosen(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(prefix)}


def test_masked_episodes_are_counted_by_reason_over_all_finished_episodes():
    metrics = metrics_of(GROUPS)
    reasons = ("aborted", "blocked", "browser_crashed", "context_overflow", "engine_error", "judge_error", "no_tokens")
    assert metrics["finished_episodes"] == 20
    assert chosen(metrics, "masked_rate") == pytest.approx(
        {"masked_rate": 7 / 20} | {f"masked_rate/{reason}": 1 / 20 for reason in reasons}
    )


def test_blocked_and_judge_errors_have_a_rate_even_without_any():
    assert chosen(metrics_of(GROUPS[:1]), "masked_rate") == {
        "masked_rate": 0.0, "masked_rate/blocked": 0.0, "masked_rate/judge_error": 0.0,
    }  # fmt: skip


def test_crashes_and_samples_are_counted_by_difficulty():
    assert chosen(metrics_of(GROUPS), "difficulty/") == pytest.approx({
        "difficulty/easy/episodes": 8, "difficulty/easy/crash_rate": 0.0, "difficulty/easy/success_rate": 2 / 7,
        "difficulty/medium/episodes": 4, "difficulty/medium/crash_rate": 0.0, "difficulty/medium/success_rate": 1.0,
        "difficulty/hard/episodes": 8, "difficulty/hard/crash_rate": 2 / 8, "difficulty/hard/success_rate": 0.0,
    })  # fmt: skip


def test_finished_episodes_of_an_aborted_group_are_no_estimate_of_the_policy():
    aborted = group(5, ("success", 1), ("success", 2), ("success", 1), ("aborted", 9))
    without, metrics = metrics_of(GROUPS), metrics_of([*GROUPS, aborted])
    assert metrics["finished_episodes"] == without["finished_episodes"] + 4
    assert metrics["masked_rate/aborted"] == 2 / 24
    assert metrics["difficulty/easy/episodes"] == 12
    estimates = ("rollout_", "group_", "difficulty/easy/success_rate")
    for prefix in estimates:
        assert chosen(metrics, prefix) == chosen(without, prefix) != {}
    assert not [name for name in metrics_of([aborted]) if name.startswith(estimates)]


def test_the_reward_variance_is_the_mean_over_groups_of_the_population_variance():
    rewards = [[t.reward for t in each.trajectories if t.trainable] for each in GROUPS]
    wanted = np.mean([np.var(values) for values in rewards if values])
    assert metrics_of(GROUPS)["group_reward_variance"] == pytest.approx(wanted)
    assert wanted > 0


def test_a_domain_with_other_characters_makes_a_metric_name_that_mlflow_accepts():
    metrics = metrics_of([group(0, ("success", 1), ("failure", 1), environment="Food & Drink / Recipes")])
    assert metrics["rollout_success_rate/Food-Drink-Recipes"] == 0.5
