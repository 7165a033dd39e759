"""Metrics of complete groups and of verdicts, computed again from hand-made ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_webrl.trainer.credit.rewards import outcome_reward
from megatron_webrl.trainer.metrics.group_statistics import GroupStatistics, SelectionStatistics, verdict_metrics
from megatron_webrl.types import Group, Verdict, Vote
from tests.trajectories import trajectory

Episode = tuple[str, int]  # outcome, steps


def group(ticket: int, *episodes: Episode, difficulty: str = "easy") -> Group:
    made = [
        trajectory(ticket, index, reward=float(outcome == "success"), outcome=outcome, steps=steps,
                   group_size=len(episodes))
        for index, (outcome, steps) in enumerate(episodes)
    ]  # fmt: skip
    task = replace(made[0].task, difficulty=difficulty)
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


def test_masked_episodes_are_counted_by_reason_and_crashes_and_successes_by_difficulty():
    metrics = metrics_of(GROUPS)
    reasons = ("aborted", "blocked", "browser_crashed", "context_overflow", "engine_error", "judge_error", "no_tokens")
    assert metrics["finished_episodes"] == 20
    assert chosen(metrics, "masked_rate") == pytest.approx(
        {"masked_rate": 7 / 20} | {f"masked_rate/{reason}": 1 / 20 for reason in reasons}
    )
    assert chosen(metrics, "difficulty/") == pytest.approx({
        "difficulty/easy/episodes": 8, "difficulty/easy/crash_rate": 0.0, "difficulty/easy/success_rate": 2 / 7,
        "difficulty/medium/episodes": 4, "difficulty/medium/crash_rate": 0.0, "difficulty/medium/success_rate": 1.0,
        "difficulty/hard/episodes": 8, "difficulty/hard/crash_rate": 2 / 8, "difficulty/hard/success_rate": 0.0,
    })  # fmt: skip
    rewards = [[t.reward for t in each.trajectories if t.trainable] for each in GROUPS]
    variances = [np.var(values) for values in rewards if values]
    assert metrics["group_reward_variance"] == pytest.approx(np.mean(variances))
    assert chosen(metrics_of(GROUPS[:1]), "masked_rate") == {  # without any
        "masked_rate": 0.0, "masked_rate/blocked": 0.0, "masked_rate/judge_error": 0.0,
    }  # fmt: skip


def test_a_crash_that_is_trained_as_a_failure_still_counts_as_a_crash():
    crashed = replace(GROUPS[0].trajectories[1], end_reason="browser_crashed")
    metrics = metrics_of([replace(GROUPS[0], trajectories=(crashed, *GROUPS[0].trajectories[2:]))])
    assert (metrics["difficulty/easy/crash_rate"], metrics["masked_rate"]) == (1 / 3, 0)


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


def test_dropped_groups_are_compared_with_trained_ones_by_length_and_difficulty():
    statistics = SelectionStatistics()
    for ticket in range(8):
        statistics.add(group(ticket, ("success", 4), ("failure", 8), difficulty="medium"), None)
        statistics.add(group(ticket, ("failure", 5), ("aborted", 2), difficulty="medium"), "aborted")
        statistics.add(group(ticket, ("failure", 7), ("failure", 8), difficulty="hard"), "all_failed")
        if ticket:  # one group too few for an alarm
            statistics.add(group(ticket, ("success", 30), ("failure", 30), difficulty="medium"), "stale")
    assert statistics.pop_metrics() == {
        "selection/trained/groups": 8, "selection/trained/steps_mean": 6, "selection/trained/difficulty_mean": 2,
        "selection/aborted/groups": 8, "selection/aborted/steps_mean": 3.5, "selection/aborted/difficulty_mean": 2,
        "selection/all_failed/groups": 8, "selection/all_failed/steps_mean": 7.5,
        "selection/all_failed/difficulty_mean": 3,
        "selection/stale/groups": 7, "selection/stale/steps_mean": 30, "selection/stale/difficulty_mean": 2,
    }  # fmt: skip
    alarms = statistics.pop_alarms()
    assert [alarm.rpartition("(")[2] for alarm in alarms] == [
        "selection/aborted/steps_mean)", "selection/all_failed/difficulty_mean)"
    ]  # fmt: skip
    assert "steps_mean 3.5 of 8 groups against 6" in alarms[0]
    assert statistics.pop_alarms() == []  # raised already
    statistics.add(group(9, ("failure", 30), ("failure", 30), difficulty="medium"), "stale")
    assert "dropped as stale" in "".join(statistics.pop_alarms())
    for _ in range(10):
        last = statistics.pop_metrics()
    assert last["selection/stale/groups"] == 1  # the others are of the first update, ten updates ago
    assert statistics.pop_metrics() == {}


def judged(outcome: str, calls: int, dollars: float, seconds: float) -> Verdict:
    return Verdict(
        outcome, "first(page, judge)", "rubric", calls=calls, prompt_tokens=100 * calls, response_tokens=10 * calls,
        dollars=dollars, seconds=seconds,
    )  # fmt: skip


VERDICTS = [
    judged("success", 4, 0.25, 2.0),
    judged("success", 2, 0.5, 4.0),
    judged("failure", 3, 0.0, 6.0),
    judged("judge_error", 3, 0.25, 8.0),
    Verdict("success", "page", seconds=0.001),
    Verdict("browser_crashed", "none"),
]


def test_cost_and_outcomes_of_verdicts_are_reported_by_evaluator_and_protocol():
    judge = "verdict/first-page-judge-rubric"
    wanted = {
        "episodes": 4, "rate/success": 0.5, "rate/failure": 0.25, "rate/judge_error": 0.25, "dollars_total": 1.0,
        "calls": 3.0, "prompt_tokens": 300.0, "response_tokens": 30.0, "dollars": 0.25, "seconds": 5.0,
    }  # fmt: skip
    # An evaluator without a model has no cost, and an episode that was not judged is no verdict.
    assert chosen(verdict_metrics(VERDICTS), "verdict/") == pytest.approx(
        {f"{judge}/{name}": value for name, value in wanted.items()}
        | {"verdict/page/episodes": 1, "verdict/page/rate/success": 1.0}
    )
    voted = [
        replace(VERDICTS[0], votes=tuple(Vote("m", outcome) for outcome in outcomes.split()))
        for outcomes in ("success failure success", "success success", "success judge_error success", "success")
    ]
    assert verdict_metrics([*voted, VERDICTS[1]])[f"{judge}/votes_differ"] == 1 / 4
