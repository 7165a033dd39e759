"""Whole jobs, `webrl train` with real Chromium, real vLLM and gloo ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from megatron_webrl.monitor.command import TOKEN_VARIABLE
from megatron_webrl.monitor.episode_index import EpisodeIndex, EpisodeQuery
from megatron_webrl.track import events as process_events
from megatron_webrl.track.evaluations import NAMES, evaluation_name
from megatron_webrl.track.timeline import PROFILES
from tests import model_runner
from tests.launch.whole_jobs import Job, assert_nothing_left
from tests.monitor.finished_jobs import check_timeline
from tests.monitor.rollouts_page import check_rollouts_page
from tests.terminal import Terminal
from tools.make_tiny_model import make_tiny_model


def assert_the_terminal_is_left_in_order(terminal: Terminal, updates: int) -> None:
    """The status line is gone without a trace, the cursor is back, and the messages and the report are there."""
    screen = terminal.finish()
    assert screen.cursor_visible
    assert screen.tallest < 20
    assert "rollout 0" in terminal.output
    assert "rollout 0" not in screen.text
    told = "stop requested (stopped): the job ends after the current update, with a checkpoint; interrupt again to stop"
    assert " ".join(screen.text.split()).count(told) == 1
    assert f"update      {updates} of 1000" in screen.text


def assert_the_status_is_that_of_a_running_job(job: Job) -> None:
    code, report = job.status()
    assert (code, report["state"], report["ended_at"]) == (0, "running", None)
    assert report["version"] >= 1
    assert report["progress"]["updates_per_hour"] > 0
    assert report["tickets"]["claimed"] > 0
    states = {role["name"]: role for role in report["roles"]}
    assert set(states) == {"control", "trainer-0", "trainer-1", "rollout-0"}
    assert {role["state"] for role in states.values()} == {"running"}
    assert all(states[name]["heartbeat_age_seconds"] < 20 for name in ("trainer-0", "rollout-0"))


def assert_the_updates_are_on_policy_and_accounted_for(job: Job) -> None:
    summary = job.summary()
    gaps = [u["logprob_mismatch_max"] for u in summary["updates"] if u["logprob_mismatch_max"] is not None]
    assert gaps
    assert max(gaps) <= 1e-3
    assert all(u["seconds"]["rollout"] > 0 and u["staleness_max"] <= 1 for u in summary["updates"])
    assert all(0 <= u["seconds"]["image_wait"] < u["seconds"]["train"] for u in summary["updates"])
    for name in ("trainer_gib", "trainer_peak_gib", "worker_gib", "worker_peak_gib"):
        assert all(0.1 < u["extra"][f"memory/{name}"] < 16 for u in summary["updates"])
    accounting = summary["accounting"]
    assert accounting["matches"]
    assert 0 < accounting["trained"] <= 4 * len(summary["updates"])  # fewer where an episode was masked
    dropped = sum(accounting["dropped"].values())
    assert accounting["finished"] == accounting["trained"] + dropped + accounting["waiting"]


@pytest.mark.timeout(900)
def test_a_job_with_tensor_parallel_ranks_is_interrupted_and_resumes_from_its_checkpoint(job: Job):
    terminal, token = Terminal(), "a-token-of-the-tests"
    settings = [
        "trainer.tensor_parallel=2", "trainer.warm_start.demonstrations=4", "trainer.minibatches=2",
        "tasks.max_steps=8", "tracking.timeline=true", "trainer.profile_updates=[1]",
        "evaluation.blank_images=true", "evaluation.temperature=1", "evaluation.greedy=true", "evaluation.skip=3",
        *(f"evaluation.{setting}" for setting in ("episodes=1", "before=true", "every=2", "after=true")),
    ]  # fmt: skip
    environment = {"TERM": "xterm-256color", "CI": "", TOKEN_VARIABLE: token}
    job.start("trainer.updates=1000", *settings, environment=environment, terminal=terminal)
    job.until(job.updates, "a first update", 480)
    job.until(lambda: "update 1 of 1000" in terminal.output, "the status line")
    address = json.loads((job.run_folder / "monitor.json").read_text())["url"]
    assert f"monitor: {address}/?token={token}" in terminal.output
    check_rollouts_page(address, token)
    assert_the_status_is_that_of_a_running_job(job)
    terminal.press(b"\x03")
    assert job.wait(90) == 130, terminal.output
    stopped, done = job.summary(), len(job.updates())
    assert stopped["outcome"] == "stopped"
    assert len(stopped["updates"]) == done
    assert_the_terminal_is_left_in_order(terminal, done)
    assert_the_updates_are_on_policy_and_accounted_for(job)
    assert_nothing_left(job)
    check_timeline(job.run_folder, {"trainer-0", "trainer-1", "rollout-0"})
    assert [path.name for path in (job.run_folder / PROFILES).iterdir()] == ["update-000001.trainer-0.json.gz"]
    state = json.loads(Path(stopped["checkpoint"], "state.json").read_text())
    assert state["version"] == done

    # The checkpoint has all weights: those that the run began with may be gone.
    model = shutil.copytree(job.model, job.folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    job.start(*settings, "run.resume=true", f"trainer.updates={done + 1}", f"model.path={model}")
    assert job.wait(400) == 0, job.output()
    summary = job.summary()
    assert summary["outcome"] == "finished"
    assert [u["version"] for u in summary["updates"]] == list(range(1, done + 2))
    assert summary["updates"][:done] == stopped["updates"]
    assert_the_updates_are_on_policy_and_accounted_for(job)
    assert "matches" in job.output()
    again = json.loads(Path(summary["checkpoint"], "state.json").read_text())
    assert again["restart_epoch"] == state["restart_epoch"] + 1
    (changed,) = [event for event in process_events.read_events(job.run_folder) if event.event == "schedule changed"]
    assert f"steps until the final learning rate 2001, now {2 * done + 3}" in changed.reason
    # One update closed its two tickets and those dropped in it.
    assert again["closed_tickets"] - state["closed_tickets"] == 2 + again["dropped_tickets"] - state["dropped_tickets"]
    assert stopped["accounting"]["trained"] < summary["accounting"]["trained"] <= stopped["accounting"]["trained"] + 4
    assert_nothing_left(job)
    assert_evaluations_are_complete(job, done + 1)
    assert_results_are_in_mlflow_and_in_the_index(job)


def assert_evaluations_are_complete(job: Job, last: int) -> None:
    """Each evaluation before and after the run has both episodes, the version and the temperature that it should."""
    evaluation = job.summary()["evaluation"]
    lines = [json.loads(line) for line in (job.run_folder / "evaluations.jsonl").read_text().splitlines()]
    versions = {name: 0 if name.startswith("before") else last for name in NAMES}
    ran = [evaluation_name(line["kind"], line["variant"]) for line in lines]
    assert [name for name in ran if name != "during"] == sorted(versions, key=versions.__getitem__)
    assert all(line["episodes"] + sum(line["no_verdict"].values()) == 2 and not line["missing"] for line in lines)
    for name, version in versions.items():
        assert evaluation[name]["versions"] == [version, version]
        assert evaluation[name]["temperature"] == (0 if name.endswith("greedy") else 1)
        assert set(evaluation[name]["environments"]) == {"click-test", "focus-text"}
    for line in ("gain of the run", "gain with blank images", "gain that needs the screenshot"):
        assert line in job.output()


def assert_results_are_in_mlflow_and_in_the_index(job: Job) -> None:
    summary = job.summary()
    client = MlflowClient(f"sqlite:///{job.folder / 'runs' / 'mlflow.db'}")
    run = client.search_runs([client.get_experiment_by_name("megatron_webrl").experiment_id])[0]
    assert run.info.status == "FINISHED"
    assert run.data.metrics["reward_mean"] == summary["updates"][-1]["reward_mean"]
    assert run.data.params["trainer.tensor_parallel"] == "2"
    assert run.data.metrics["evaluation/success_of_judged"] == summary["evaluation"]["after"]["success_of_judged"]
    assert {"config.yaml", "summary.json"} <= {each.path for each in client.list_artifacts(run.info.run_id)}
    index = EpisodeIndex(job.run_folder)
    index.refresh()
    stored = index.search(EpisodeQuery())
    assert dict(stored.facets["kind"]).keys() >= {"training", *NAMES}
    assert dict(stored.facets["disposition"])["trained"] == summary["accounting"]["trained"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("architecture", "dtype", "gap"),
    [("qwen3_vl", "float32", 1e-3), pytest.param("qwen3_5", "bfloat16", 1e-2, marks=pytest.mark.soak)],
)
def test_a_mixture_of_experts_trains_over_stages_and_converts_back(job: Job, architecture: str, dtype: str, gap: float):
    """`dtype`: of the engine. `gap`: largest difference of log-probabilities of engine and trainer."""
    job.model = model = make_tiny_model(job.folder / "model", architecture=architecture, seed=1, experts=4)
    converted, trained = job.folder / "converted", job.folder / "trained"
    subprocess.run([sys.executable, "tools/hf_to_megatron.py", model, converted, "--ep", "2"], check=True)
    stages = ("trainer.pipeline_parallel=2", f"rollout.dtype={dtype}")
    job.start(*stages, f"model.checkpoint={converted}", "trainer.updates=1")
    assert job.wait(400) == 0, job.output()
    summary = job.summary()
    # The engine's weights came from the trainer, and the trainer's from the checkpoint.
    assert summary["updates"][0]["logprob_mismatch_max"] <= gap
    replayed = summary["updates"][0]["extra"].get("routing_replayed", 0)
    assert replayed > 0.9 if model_runner.is_v2() else replayed == 0
    assert summary["accounting"]["matches"]
    subprocess.run([sys.executable, "tools/megatron_to_hf.py", summary["checkpoint"], trained], check=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, trained))
    assert before.keys() == after.keys()
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert 0 < (before[experts] - after[experts]).abs().max() < 1e-3


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "stepping", "lags"), [("sync", "lockstep", [0, 0, 0]), ("one_step_off", "free", [0, 1, 1])]
)
def test_each_batch_is_generated_by_one_version_with_the_staleness_of_the_mode(
    job: Job, mode: str, stepping: str, lags: list[int]
) -> None:
    staleness = "rollout.max_staleness=2"  # the default, which the mode replaces
    job.start(
        f"rollout.mode={mode}", f"rollout.stepping={stepping}", staleness, "trainer.updates=3", "tracking.timeline=true"
    )
    assert job.wait(500) == 0, job.output()
    updates, accounting = job.summary()["updates"], job.summary()["accounting"]
    assert [update["staleness_max"] for update in updates] == lags
    assert [update["staleness_mean"] for update in updates] == lags
    for extra in (update["extra"] for update in updates):
        assert extra["versions_per_step"] == 1.0
        assert 0 < extra["engine/idle_fraction"] < 1
        assert 0 < extra["engine/running_requests"] <= extra["engine/running_episodes"]
    assert accounting["matches"], accounting
    assert accounting["tokens"]["trained"] > 0
    check_timeline(job.run_folder, {"trainer-0", "rollout-0"})
    assert_nothing_left(job)
