"""Metrics, summary, table and trajectory page of a few made-up episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_webrl.monitor.job_display import UPDATE_COLUMNS
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.metrics import UpdateMetrics, UpdateSeconds, episode_metrics, rollout_seconds, update_metrics
from megatron_webrl.track.tables import accounting_line
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.types import Group
from tests.trajectories import trajectory


def make_update(version: int, gap: float | None = 1.5e-6) -> UpdateMetrics:
    return UpdateMetrics(
        version=version,
        groups=8,
        reward_mean=0.4375,
        steps_mean=2.5,
        response_tokens_mean=123.4,
        staleness_mean=1.25,
        staleness_max=2,
        clip_fraction=0.0123,
        logprob_mismatch_max=gap,
        logprob_mismatch_tokens=0 if gap is None else 100,
        tokens_per_second=12345.6,
        seconds=UpdateSeconds(rollout=120.5, train=33.3, sync=1.25, wait=80.0, image_wait=0.5),
        extra={"entropy": 0.5, "rollout_success_rate": 0.4375},
    )


def test_mlflow_metrics_include_every_number_of_the_table():
    scalars = update_metrics(make_update(3).to_json())
    assert scalars["seconds/rollout"] == 120.5
    assert scalars["entropy"] == 0.5
    assert scalars["logprob_mismatch_max"] == 1.5e-6
    assert "logprob_mismatch_max" not in update_metrics(make_update(3, gap=None).to_json())
    assert len(scalars) >= len(UPDATE_COLUMNS)


def test_the_summary_has_all_its_fields(tmp_path: Path):
    summary.open_updates(tmp_path).append(make_update(1).to_json(), make_update(2, gap=None).to_json())
    accounting = Accounting(trained=6)
    accounting.dropped["stale"] = 2
    EventLog(tmp_path, 3).add("trainer-0", events.RESTARTED, "it was killed")
    summary.write_summary(tmp_path, "finished", accounting.summary(finished=14, waiting=1, rolled_back=5))
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["outcome"] == "finished"
    assert [u["version"] for u in content["updates"]] == [1, 2]
    assert content["updates"][1]["logprob_mismatch_max"] is None
    assert content["accounting"] == {
        "finished": 14,
        "trained": 6,
        "dropped": {"stale": 2},
        "waiting": 1,
        "rolled_back": 5,
        "matches": True,
        "tokens": {"trained": 0, "dropped": {}},
    }
    assert "+ 1 waiting + 5 rolled back = 14: matches" in accounting_line(content["accounting"])
    (again,) = content["restarts"]
    assert (again["role"], again["reason"], again["node"]) == ("trainer-0", "it was killed", 3)
    assert content["package_versions"]["torch"]
    assert content["checkpoint"] is None


def test_a_failure_after_the_trainers_end_keeps_its_account(tmp_path: Path):
    accounting = Accounting(trained=8).summary(finished=8, waiting=0)
    summary.write_summary(tmp_path, "finished", accounting)
    summary.ensure_written(tmp_path, "finished")
    assert summary.read_summary(tmp_path)["outcome"] == "finished"
    summary.ensure_written(tmp_path, "failed: a worker did not end")
    content = summary.read_summary(tmp_path)
    assert (content["outcome"], content["accounting"]) == ("failed: a worker did not end", accounting)
    (tmp_path / "summary.json").write_text("{")
    summary.ensure_written(tmp_path, "failed: again")
    assert summary.read_summary(tmp_path)["accounting"] is None


def test_accounting_that_does_not_match_is_reported():
    accounting = Accounting(trained=6).summary(finished=9, waiting=1)
    assert not accounting["matches"]
    assert "9 finished = 6 trained + 0 dropped (none) + 1 waiting = 7: DOES NOT MATCH" in accounting_line(accounting)


def test_episode_metrics_exclude_masked_episodes():
    group = Group(
        0, (trajectory(0, 0, reward=1.0), trajectory(0, 1, steps=3), trajectory(0, 2, outcome="browser_crashed"))
    )
    metrics = episode_metrics([group])
    assert metrics["success_rate"] == 0.5
    assert metrics["masked_episodes"] == 1
    assert metrics["steps_mean/success"] == 1
    assert metrics["steps_mean/failure"] == 3
    assert metrics["action_rate/left_click"] == 1.0
    assert metrics["success_rate/click-test"] == 0.5


def test_the_prefix_cache_hit_rate_is_weighted_by_tokens():
    one, two = trajectory(0, 0, prompt=30, reward=1.0), trajectory(0, 1, prompt=10)
    group = Group(0, (replace(one, steps=(replace(one.steps[0], cached_prompt_tokens=16),)), two))
    metrics = episode_metrics([group])
    assert metrics["prefix_cache_hit_rate"] == 16 / 40
    assert metrics["prompt_tokens_per_step"] == 20


def test_rollout_time_spans_all_episodes():
    one, two = trajectory(0, 0), trajectory(5, 0)
    assert rollout_seconds([one, two]) == pytest.approx(6.0)


def test_each_leniency_is_a_share_of_the_trainable_steps():
    first, second = (trajectory(index=index, steps=2, reward=float(index)) for index in (0, 1))
    masked = trajectory(index=2, steps=2, outcome="browser_error")
    lenient = replace(first.steps[0], leniencies=("digit_string", "url_scheme"))
    first, masked = (replace(episode, steps=(lenient, episode.steps[1])) for episode in (first, masked))
    second = replace(second, steps=(replace(lenient, leniencies=("url_scheme",)), second.steps[1]))
    metrics = episode_metrics([Group(0, (first, second, masked))])
    shares = {name: value for name, value in metrics.items() if name.startswith("leniency/")}
    assert shares == {"leniency/digit_string": 0.25, "leniency/url_scheme": 0.5}
