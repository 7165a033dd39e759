"""Metrics, summary, table and trajectory page of a few made-up episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import async_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.monitor.job_display import UPDATE_COLUMNS
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.metrics import UpdateMetrics, UpdateSeconds, episode_metrics, rollout_seconds, update_metrics
from megatron_webrl.track.tables import accounting_line
from megatron_webrl.track.trajectory_page import trajectory_page
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.types import Group, JudgeStage, Trajectory, Verdict
from tests.trajectories import screenshot, trajectory


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


def with_image(instruction: str) -> Trajectory:
    plain = trajectory(7, 1)
    step = replace(plain.steps[0], images=np.zeros(1, np.int32), image_grids=np.ones((1, 3), np.int32))
    return replace(plain, instruction=instruction, images=(screenshot(0),), steps=(step,))


def test_a_trajectory_page_shows_screenshot_click_and_response():
    text = trajectory_page(with_image("Click <b>here</b>"), lambda ids: f"<{len(ids)} tokens>")
    assert "data:image/png;base64," in text
    assert "left:50.0%;top:50.0%" in text
    assert "&lt;3 tokens&gt;" in text
    assert "<b>here</b>" not in text


async def test_a_trajectory_page_shows_its_images_and_runs_no_script_even_if_one_got_in(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(trajectory_page(with_image("Click here"), str))
    page.write_text(
        f"{page.read_text()}<script>document.title = 'owned'</script><img src=x onerror=\"document.title='x'\">"
    )
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=find_chromium(), chromium_sandbox=use_sandbox())
        opened = await browser.new_page()
        await opened.goto(page.as_uri())
        assert await opened.title() == "click-test: Click here"
        assert await opened.evaluate("document.images[0].naturalWidth") > 0
        assert await opened.evaluate("getComputedStyle(document.querySelector('.mark')).position") == "absolute"
        await browser.close()


def test_a_trajectory_page_shows_every_stage_of_the_verdict_and_the_final_screenshot(tmp_path: Path):
    stage = JudgeStage(
        "rubric", "fact 2", "no", "The <price> is not shown.", "0123456789abcdef", "m", 2, ("truncated",)
    )
    verdict = Verdict("failure", "judge", "rubric", "feed", "fact 2 is not met", (stage,), calls=4, dollars=0.01)
    plain = with_image("Find the price")
    judged = replace(plain, images=(*plain.images, screenshot(1)), verdict=verdict)
    (tmp_path / "page.html").write_text(trajectory_page(judged, str))
    text = (tmp_path / "page.html").read_text()
    assert "Verdict: failure by judge (rubric, prompts feed): fact 2 is not met; 4 calls, 0.0100 dollars" in text
    for part in ("rubric fact 2", "<td>no</td>", "The &lt;price&gt; is not shown.", "truncated", "0123456789ab<"):
        assert part in text
    assert text.count("data:image/png;base64,") == 2
    assert "After the last step" in text


def test_each_leniency_is_a_share_of_the_trainable_steps():
    first, second = (trajectory(index=index, steps=2, reward=float(index)) for index in (0, 1))
    masked = trajectory(index=2, steps=2, outcome="browser_error")
    lenient = replace(first.steps[0], leniencies=("digit_string", "url_scheme"))
    first, masked = (replace(episode, steps=(lenient, episode.steps[1])) for episode in (first, masked))
    second = replace(second, steps=(replace(lenient, leniencies=("url_scheme",)), second.steps[1]))
    metrics = episode_metrics([Group(0, (first, second, masked))])
    shares = {name: value for name, value in metrics.items() if name.startswith("leniency/")}
    assert shares == {"leniency/digit_string": 0.25, "leniency/url_scheme": 0.5}
