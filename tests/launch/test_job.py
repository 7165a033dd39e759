"""Whole jobs, `webrl train` with real Chromium, real vLLM and gloo ranks: training, Ctrl-C, bad configurations."""

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
from tests.launch.whole_jobs import Job, assert_nothing_left
from tests.monitor.finished_jobs import check_timeline
from tests.monitor.rollouts_page import check_rollouts_page
from tests.terminal import Terminal
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_job_trains_with_tensor_parallel_ranks_after_a_warm_start(job: Job):
    evaluation = [f"evaluation.{setting}" for setting in ("episodes=1", "every=1", "before=true", "after=true")]
    job.start(
        "trainer.tensor_parallel=2", "trainer.warm_start.demonstrations=12", "trainer.minibatches=2",
        *evaluation, "evaluation.blank_images=true", "evaluation.temperature=1", "evaluation.greedy=true",
        "evaluation.skip=3", "tracking.timeline=true", "trainer.profile_updates=[2]",
    )  # fmt: skip
    assert job.wait(500) == 0, job.output()
    summary = job.summary()
    assert summary["outcome"] == "finished"
    assert [u["version"] for u in summary["updates"]] == [1, 2]
    gaps = [u["logprob_mismatch_max"] for u in summary["updates"] if u["logprob_mismatch_max"] is not None]
    assert gaps
    assert max(gaps) <= 1e-3
    assert all(u["seconds"]["rollout"] > 0 and u["staleness_max"] <= 1 for u in summary["updates"])
    assert all(0 <= u["seconds"]["image_wait"] < u["seconds"]["train"] for u in summary["updates"])
    for name in ("trainer_gib", "trainer_peak_gib", "worker_gib", "worker_peak_gib"):
        assert all(0.1 < u["extra"][f"memory/{name}"] < 16 for u in summary["updates"])
    accounting = summary["accounting"]
    assert accounting["matches"]
    assert 0 < accounting["trained"] <= 8  # fewer where an episode of a trained group was masked
    dropped = sum(accounting["dropped"].values())
    assert accounting["finished"] == accounting["trained"] + dropped + accounting["waiting"]
    assert "matches" in job.output()
    lines = [json.loads(line) for line in (job.run_folder / "evaluations.jsonl").read_text().splitlines()]
    ran = [evaluation_name(line["kind"], line["variant"]) for line in lines]
    names = {name: 0 if name.startswith("before") else 2 for name in NAMES}
    assert sorted(ran) == sorted([*names, "during"])
    assert [name for name in ran if name != "during"] == sorted(names, key=names.__getitem__)
    assert all(line["episodes"] + sum(line["no_verdict"].values()) == 2 and not line["missing"] for line in lines)
    for name, version in names.items():
        assert summary["evaluation"][name]["versions"] == [version, version]
        assert summary["evaluation"][name]["temperature"] == (0 if name.endswith("greedy") else 1)
        assert set(summary["evaluation"][name]["environments"]) == {"click-test", "focus-text"}
    for line in ("gain of the run", "gain with blank images", "gain that needs the screenshot"):
        assert line in job.output()
    assert summary["package_versions"]["megatron-core"]
    assert Path(summary["checkpoint"], "megatron").is_dir()
    assert_nothing_left(job)

    client = MlflowClient(f"sqlite:///{job.folder / 'runs' / 'mlflow.db'}")
    run = client.search_runs([client.get_experiment_by_name("megatron_webrl").experiment_id])[0]
    assert run.info.status == "FINISHED"
    assert run.data.metrics["reward_mean"] == summary["updates"][-1]["reward_mean"]
    assert run.data.params["trainer.tensor_parallel"] == "2"
    assert run.data.metrics["evaluation/success_of_judged"] == summary["evaluation"]["after"]["success_of_judged"]
    artifacts = {a.path for a in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "summary.json"} <= artifacts
    index = EpisodeIndex(job.run_folder)
    index.refresh()
    stored = index.search(EpisodeQuery())
    assert dict(stored.facets["kind"]).keys() == {"training", *ran}
    assert dict(stored.facets["disposition"])["trained"] == accounting["trained"]
    check_timeline(job.run_folder, {"trainer-0", "trainer-1", "rollout-0"})
    profiles = {path.name for path in (job.run_folder / PROFILES).iterdir()}
    assert profiles == {"update-000002.trainer-0.json.gz"}


def assert_the_terminal_is_left_in_order(terminal: Terminal, updates: int) -> None:
    """The status line is gone without a trace, the cursor is back, and the messages and the report are there."""
    screen = terminal.finish()
    assert screen.cursor_visible
    assert screen.tallest < 20
    assert "rollout 0" in terminal.output
    assert "rollout 0" not in screen.text
    told = "stop requested (stopped): the job ends after the current update, with a checkpoint; interrupt again to stop"
    assert " ".join(screen.text.split()).count(told) == 1
    assert screen.text.count("success") == 2, "in the header of the updates and in the report"
    assert f"update      {updates} of 1000" in screen.text


@pytest.mark.parametrize(
    ("architecture", "dtype", "gap"),
    [("qwen3_vl", "float32", 1e-3), pytest.param("qwen3_5", "bfloat16", 1e-2, marks=pytest.mark.soak)],
)
def test_a_mixture_of_experts_trains_over_two_stages_from_a_converted_checkpoint_and_back(
    job: Job, architecture: str, dtype: str, gap: float
):
    """`dtype`: of the engine. `gap`: largest difference of log-probabilities of engine and trainer."""
    model = make_tiny_model(job.folder / "model", architecture=architecture, seed=1, experts=4)
    converted, trained = job.folder / "converted", job.folder / "trained"
    job.model = model
    subprocess.run([sys.executable, "tools/hf_to_megatron.py", model, converted, "--ep", "2"], check=True)
    stages = ("trainer.pipeline_parallel=2", f"rollout.dtype={dtype}")
    job.start(*stages, f"model.checkpoint={converted}", "trainer.updates=1")
    assert job.wait(400) == 0, job.output()
    summary = job.summary()
    # The engine's weights came from the trainer, and the trainer's from the checkpoint.
    assert summary["updates"][0]["logprob_mismatch_max"] <= gap
    assert json.loads((job.run_folder / "updates.jsonl").read_text())["extra"]["routing_replayed"] > 0.9
    assert summary["accounting"]["matches"]
    assert_nothing_left(job)
    subprocess.run([sys.executable, "tools/megatron_to_hf.py", summary["checkpoint"], trained], check=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, trained))
    assert before.keys() == after.keys()
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert 0 < (before[experts] - after[experts]).abs().max() < 1e-3


def test_ctrl_c_writes_a_checkpoint_from_which_the_run_resumes(job: Job):
    terminal, token = Terminal(), "a-token-of-the-tests"
    environment = {"TERM": "xterm-256color", "CI": "", TOKEN_VARIABLE: token}
    job.start("trainer.updates=1000", "tasks.max_steps=12", environment=environment, terminal=terminal)
    job.until(job.updates, "a first update")
    job.until(lambda: "update 1 of 1000" in terminal.output, "the status line")
    address = json.loads((job.run_folder / "monitor.json").read_text())["url"]
    assert f"monitor: {address}/?token={token}" in terminal.output
    check_rollouts_page(address, token)
    code, report = job.status()
    assert (code, report["state"], report["ended_at"]) == (0, "running", None)
    assert report["version"] >= 1
    assert report["progress"]["updates_per_hour"] > 0
    assert report["tickets"]["claimed"] > 0
    states = {role["name"]: role for role in report["roles"]}
    assert set(states) == {"control", "trainer-0", "rollout-0"}
    assert {role["state"] for role in states.values()} == {"running"}
    assert states["trainer-0"]["status"].startswith("update ")
    assert all(states[name]["heartbeat_age_seconds"] < 20 for name in ("trainer-0", "rollout-0"))
    assert job.process is not None
    terminal.press(b"\x03")
    assert job.wait(90) == 130, terminal.output
    stopped = job.summary()
    assert_the_terminal_is_left_in_order(terminal, len(stopped["updates"]))
    assert stopped["outcome"] == "stopped"
    assert stopped["accounting"]["matches"]
    assert_nothing_left(job)
    state = json.loads(Path(stopped["checkpoint"], "state.json").read_text())
    done = len(stopped["updates"])
    assert state["version"] == done >= 1

    # The checkpoint has all weights: those that the run began with may be gone.
    model = shutil.copytree(job.model, job.folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    job.start("run.resume=true", f"trainer.updates={done + 1}", f"model.path={model}")
    assert job.wait(300) == 0, job.output()
    summary = job.summary()
    assert [u["version"] for u in summary["updates"]] == list(range(1, done + 2))
    assert summary["updates"][:done] == stopped["updates"]
    assert summary["accounting"]["matches"]
    again = json.loads(Path(summary["checkpoint"], "state.json").read_text())
    assert again["restart_epoch"] == state["restart_epoch"] + 1
    (changed,) = [event for event in process_events.read_events(job.run_folder) if event.event == "schedule changed"]
    assert f"steps until the final learning rate 1001, now {done + 2}" in changed.reason
    # One update closed its two tickets and those dropped in it.
    assert again["closed_tickets"] - state["closed_tickets"] == 2 + again["dropped_tickets"] - state["dropped_tickets"]
    assert stopped["accounting"]["trained"] < summary["accounting"]["trained"] <= stopped["accounting"]["trained"] + 4
    assert_nothing_left(job)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("no.such.key=1", "unknown setting no"),
        (
            "trainer.tensor_parallel=3",
            "tensor_parallel=3 does not divide num_attention_heads=4 (trainer.tensor",
        ),
        ("model.path=nowhere", "model.path=nowhere is not a folder"),
        ("ring.capacity_mib=100000000", "ring.capacity_mib=100000000 exceeds"),
        ("trainer.optimizer.learning_rate=-1", "trainer.optimizer.learning_rate=-1.0 must be greater than 0"),
        ("tasks.environments=[click-tset]", "near: click-test"),
    ],
)
def test_a_broken_configuration_ends_with_one_line_before_anything_starts(job: Job, override: str, message: str):
    job.start(override)
    assert job.wait(60) == 2
    output = job.output()
    assert message in output
    assert output.count("\n") == 1
    assert not job.run_folder.exists()
