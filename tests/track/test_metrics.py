"""Metrics and the summary of a few made-up episodes, computed again by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.metrics import (
    UpdateMetrics,
    UpdateSeconds,
    episode_metrics,
    rollout_seconds,
    step_metrics,
    update_metrics,
)
from megatron_webrl.track.tables import accounting_line
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.types import Action, Group, Step, Trajectory
from tests.trajectories import trajectory


def step(versions: list[int], *, changed: bool = True, action: str | None = "left_click", characters: int = 0,
         memory: int = -1) -> Step:  # fmt: skip
    (made,) = trajectory(response=len(versions)).steps
    return replace(
        made, versions=np.array(versions, np.int32), page_changed=changed, response_characters=characters,
        memory_characters=memory, action=None if action is None else Action(action),
    )  # fmt: skip


def group(*episodes: tuple[str, list[Step]]) -> Group:
    members: list[Trajectory] = []
    for index, (outcome, steps) in enumerate(episodes):
        made = trajectory(0, index, reward=float(outcome == "success"), outcome=outcome)
        members.append(replace(made, steps=tuple(steps)))
    return Group(0, tuple(members))


def test_step_metrics_follow_their_definitions_and_exclude_masked_episodes():
    batch = group(
        ("success", [
            step([3, 3], characters=10, memory=0),
            step([3, 5, 4, 4], changed=False, characters=25, memory=7),
        ]),
        ("failure", [
            step([6], changed=False, action="wait", characters=4),
            step([6, 7, 7], changed=False, characters=0, memory=11),
            step([], changed=False, action=None, characters=1, memory=3),
        ]),
        ("browser_crashed", [step([1] * 90, characters=1000, memory=5000)]),
    )  # fmt: skip
    assert step_metrics([batch], uses_memory=True) == pytest.approx({
        "response_characters_mean": 8.0,
        "response_characters_max": 25.0,
        "response_tokens_max": 4.0,
        "response_tokens_mean/success": 3.0,
        "response_tokens_mean/failure": 4 / 3,
        "page_unchanged_rate/success": 0.5,
        "page_unchanged_rate/failure": 1.0,
        "stuck_rate": 2 / 5,  # one click of each episode; neither the wait nor the step without an action
        "memory_missing_rate": 1 / 5,
        "memory_empty_rate": 1 / 5,
        "memory_characters_mean": 21 / 4,
        "memory_characters_max": 11.0,
        "versions_per_batch": 5.0,
        "updates_within_step_mean": (0 + 2 + 0 + 1) / 4,
        "updates_within_step_max": 2.0,
        "updates_across_steps_mean": (2 + 1) / 2,
        "updates_across_steps_max": 2.0,
    })  # fmt: skip
    assert not [name for name in step_metrics([batch], uses_memory=False) if name.startswith("memory")]
    metrics = step_metrics([group(("failure", [step([1], changed=False, action="answer")]))], uses_memory=True)
    assert (metrics["memory_missing_rate"], metrics["stuck_rate"]) == (1.0, 0.0)
    assert not [name for name in metrics if name.startswith("memory_characters")]  # there is no length to measure
    assert step_metrics([group(("engine_error", []))], uses_memory=True) == {}


def test_episode_metrics_exclude_masked_episodes_and_weigh_by_tokens_and_steps():
    first = trajectory(0, 0, prompt=30, reward=1.0)
    lenient = replace(first.steps[0], cached_prompt_tokens=16, leniencies=("digit_string", "url_scheme"))
    second = trajectory(0, 1, prompt=10, steps=3)
    also = replace(second.steps[0], leniencies=("url_scheme",))
    masked = replace(trajectory(0, 2, outcome="browser_crashed"), steps=(lenient,) * 5)
    members = (replace(first, steps=(lenient,)), replace(second, steps=(also, *second.steps[1:])), masked)
    metrics = episode_metrics([Group(0, members)])
    expected = {
        "success_rate": 0.5, "success_rate/click-test": 0.5, "masked_episodes": 1, "steps_mean/success": 1,
        "steps_mean/failure": 3, "action_rate/left_click": 1.0, "prefix_cache_hit_rate": 16 / 60,
        "prompt_tokens_per_step": 15, "leniency/digit_string": 0.25, "leniency/url_scheme": 0.5,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert rollout_seconds([trajectory(0, 0), trajectory(5, 0)]) == pytest.approx(6.0)


def test_the_summary_has_updates_accounting_and_restarts(tmp_path: Path):
    made = UpdateMetrics(
        version=1, groups=8, reward_mean=0.4375, steps_mean=2.5, response_tokens_mean=123.4, staleness_mean=1.25,
        staleness_max=2, clip_fraction=0.0123, logprob_mismatch_max=1.5e-6, logprob_mismatch_tokens=100,
        tokens_per_second=12345.6, extra={"entropy": 0.5},
        seconds=UpdateSeconds(rollout=120.5, train=33.3, sync=1.25, wait=80.0, image_wait=0.5),
    )  # fmt: skip
    without = replace(made, version=2, logprob_mismatch_max=None, logprob_mismatch_tokens=0)
    scalars = update_metrics(made.to_json())
    values = (scalars["seconds/rollout"], scalars["entropy"], scalars["logprob_mismatch_max"])
    assert values == (120.5, 0.5, 1.5e-6)
    assert "logprob_mismatch_max" not in update_metrics(without.to_json())
    summary.open_updates(tmp_path).append(made.to_json(), without.to_json())
    accounting = Accounting(trained=6)
    accounting.dropped["stale"] = 2
    EventLog(tmp_path, 3).add("trainer-0", events.RESTARTED, "it was killed")
    summary.write_summary(tmp_path, "finished", accounting.summary(finished=14, waiting=1, rolled_back=5))
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["outcome"] == "finished"
    assert [u["version"] for u in content["updates"]] == [1, 2]
    assert content["updates"][1]["logprob_mismatch_max"] is None
    assert content["accounting"] == {
        "finished": 14, "trained": 6, "dropped": {"stale": 2}, "waiting": 1, "rolled_back": 5, "matches": True,
        "tokens": {"trained": 0, "dropped": {}},
    }  # fmt: skip
    assert "+ 1 waiting + 5 rolled back = 14: matches" in accounting_line(content["accounting"])
    (again,) = content["restarts"]
    assert (again["role"], again["reason"], again["node"]) == ("trainer-0", "it was killed", 3)
    assert content["package_versions"]["torch"]
    assert content["checkpoint"] is None


def test_a_failure_after_the_trainers_end_keeps_its_account(tmp_path: Path):
    accounting = Accounting(trained=6).summary(finished=9, waiting=1)
    assert "9 finished = 6 trained + 0 dropped (none) + 1 waiting = 7: DOES NOT MATCH" in accounting_line(accounting)
    summary.write_summary(tmp_path, "finished", accounting)
    summary.ensure_written(tmp_path, "finished")
    assert summary.read_summary(tmp_path)["outcome"] == "finished"
    summary.ensure_written(tmp_path, "failed: a worker did not end")
    content = summary.read_summary(tmp_path)
    assert (content["outcome"], content["accounting"]) == ("failed: a worker did not end", accounting)
    (tmp_path / "summary.json").write_text("{")
    summary.ensure_written(tmp_path, "failed: again")
    assert summary.read_summary(tmp_path)["accounting"] is None
