"""Whole jobs: `webrl train` with real Chromium, real vLLM and gloo ranks, to its end and to its other ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from megatron_webrl.system.child_process import OWNER_VARIABLE
from megatron_webrl.tracking import episode_log, events
from tests.preflight.run_checks import wrong_with
from tests.tiny_settings import SETTINGS

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Job:
    """One `webrl train` in a folder of its own."""

    folder: Path
    model: Path
    name: str = "job"
    process: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.time)
    shared_memory: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self, *overrides: str) -> None:
        path = self.folder / "config.yaml"
        settings = {**SETTINGS, "model": {"path": str(self.model)}}
        settings["run"] = {"name": self.name, "directory": str(self.folder / "runs")}
        path.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "megatron_webrl.cli", "train", str(path), *overrides]
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        with (self.folder / "out.log").open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 240.0) -> Any:
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.output()}"
            time.sleep(0.1)
        return found

    def output(self) -> str:
        return (self.folder / "out.log").read_text()

    def updates(self) -> list[dict[str, Any]]:
        path = self.run_folder / "updates.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_folder / "summary.json").read_text())

    def status(self) -> tuple[int, dict[str, Any]]:
        """Exit code and report of `webrl status`."""
        command = [sys.executable, "-m", "megatron_webrl.cli", "status", str(self.run_folder), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=False)
        return done.returncode, json.loads(done.stdout)

    def role(self, name: str) -> psutil.Process | None:
        """The process of a role, by what its launcher called it."""
        for process in owned(self.process.pid if self.process else 0):
            try:
                if process.environ().get("WEBRL_ROLE") == name and "megatron_webrl.cli" in " ".join(process.cmdline()):
                    return process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return None


def owned(launcher: int) -> list[psutil.Process]:
    """Processes that carry the launcher's mark in their environment, zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(OWNER_VARIABLE, "").startswith(f"{launcher}:")
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def rings(job: Job) -> list[Path]:
    return list(Path("/dev/shm").glob(f"webrl-{job.name}-*"))


def browsers(since: float) -> list[psutil.Process]:
    """Chromium's processes started later than `since`; most of them hide their environment."""
    found = psutil.process_iter(["name", "create_time", "status"])
    return [
        p
        for p in found
        if "chrom" in p.info["name"] and p.info["create_time"] > since and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


def assert_nothing_left(job: Job) -> None:
    assert job.process is not None
    assert not owned(job.process.pid)
    assert not browsers(job.started)
    assert not set(os.listdir("/dev/shm")) - job.shared_memory
    assert not list(Path(tempfile.gettempdir()).glob(f"webrl-{job.process.pid}-*"))


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(tmp_path, tiny_model, name=f"t{os.getpid()}-{abs(hash(request.node.name)) % 10_000}")
    yield job
    if job.process is not None and job.process.poll() is None:
        job.process.kill()
        job.process.wait()


def test_a_job_trains_with_tensor_parallel_ranks_after_a_warm_start(job: Job):
    evaluation = [f"evaluation.{setting}" for setting in ("episodes=1", "every=1", "before=true", "after=true")]
    job.start(
        "trainer.tensor_parallel=2", "trainer.warm_start.demonstrations=12", "trainer.minibatches=2",
        *evaluation, "evaluation.blank_images=true",
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
    accounting = summary["accounting"]
    assert accounting["matches"]
    assert 0 < accounting["trained"] <= 8  # fewer where an episode of a trained group was masked
    dropped = sum(accounting["dropped"].values())
    assert accounting["finished"] == accounting["trained"] + dropped + accounting["waiting"]
    assert "matches" in job.output()
    lines = [json.loads(line) for line in (job.run_folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["before", "during", "after", "blank_images"]
    assert all(line["episodes"] + sum(line["no_verdict"].values()) == 2 and not line["missing"] for line in lines)
    for name, version in (("before", 0), ("after", 2), ("blank_images", 2)):
        assert summary["evaluation"][name]["versions"] == [version, version]
        assert set(summary["evaluation"][name]["environments"]) == {"click-test", "focus-text"}
    assert "gain of the run" in job.output()
    assert summary["package_versions"]["megatron-core"]
    assert Path(summary["checkpoint"], "megatron").is_dir()
    assert_nothing_left(job)

    client = MlflowClient(f"sqlite:///{job.folder / 'runs' / 'mlflow.db'}")
    run = client.search_runs([client.get_experiment_by_name("megatron_webrl").experiment_id])[0]
    assert run.info.status == "FINISHED"
    assert run.data.metrics["reward_mean"] == summary["updates"][-1]["reward_mean"]
    assert run.data.params["trainer.tensor_parallel"] == "2"
    assert run.data.metrics["evaluation/success"] == summary["evaluation"]["after"]["success"]
    artifacts = {a.path for a in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "summary.json", "trajectories"} <= artifacts
    pages = list((job.run_folder / "trajectories").glob("*.html"))
    assert len(pages) == 4
    assert all("data:image/png;base64," in page.read_text() for page in pages)


def test_a_mixture_of_experts_trains_over_two_stages_from_a_converted_checkpoint_and_back(
    job: Job, tiny_sparse_model: Path
):
    job.model = tiny_sparse_model
    converted, trained = job.folder / "converted", job.folder / "trained"
    subprocess.run([sys.executable, "tools/hf_to_megatron.py", tiny_sparse_model, converted, "--ep", "2"], check=True)
    job.start("trainer.pipeline_parallel=2", f"model.checkpoint={converted}", "trainer.updates=1")
    assert job.wait(400) == 0, job.output()
    summary = job.summary()
    # The engine's weights came from the trainer, and the trainer's from the checkpoint.
    assert summary["updates"][0]["logprob_mismatch_max"] <= 1e-3
    assert summary["accounting"]["matches"]
    assert_nothing_left(job)
    subprocess.run([sys.executable, "tools/megatron_to_hf.py", summary["checkpoint"], trained], check=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_sparse_model, trained))
    assert before.keys() == after.keys()
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert 0 < (before[experts] - after[experts]).abs().max() < 1e-3


def test_ctrl_c_saves_what_was_learnt_and_the_run_goes_on_from_there(job: Job):
    job.start("trainer.updates=50")
    job.until(job.updates, "a first update")
    code, report = job.status()
    assert (code, report["state"], report["ended_at"]) == (0, "running", None)
    assert report["version"] >= 1
    assert report["progress"]["updates_per_hour"] > 0
    assert report["tickets"]["claimed"] > 0
    assert report["rings"][0]["capacity_mib"] == 64
    states = {role["name"]: role for role in report["roles"]}
    assert set(states) == {"control", "trainer-0", "rollout-0"}
    assert {role["state"] for role in states.values()} == {"running"}
    assert states["trainer-0"]["status_line"].startswith("update ")
    assert all(states[name]["heartbeat_age_seconds"] < 20 for name in ("trainer-0", "rollout-0"))
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(90) == 130, job.output()
    stopped = job.summary()
    assert stopped["outcome"] == "stopped"
    assert stopped["accounting"]["matches"]
    assert_nothing_left(job)
    state = json.loads(Path(stopped["checkpoint"], "state.json").read_text())
    done = len(stopped["updates"])
    assert state["version"] == done >= 1

    job.start("run.resume=true", f"trainer.updates={done + 1}")
    assert job.wait(300) == 0, job.output()
    summary = job.summary()
    assert [u["version"] for u in summary["updates"]] == list(range(1, done + 2))
    assert summary["updates"][:done] == stopped["updates"]
    assert summary["accounting"]["matches"]
    again = json.loads(Path(summary["checkpoint"], "state.json").read_text())
    assert again["restart_epoch"] == state["restart_epoch"] + 1
    assert again["mlflow_run_id"] == state["mlflow_run_id"]
    # One update closed its two tickets, and those that were dropped meanwhile.
    assert again["closed_tickets"] - state["closed_tickets"] == 2 + again["dropped_tickets"] - state["dropped_tickets"]
    assert stopped["accounting"]["trained"] < summary["accounting"]["trained"] <= stopped["accounting"]["trained"] + 4
    assert_nothing_left(job)


@pytest.mark.parametrize(
    ("role", "overrides", "words"),
    [
        ("rollout-0", ["run.max_worker_restarts=0"], "failed: "),
        (
            "trainer-0",
            ["run.max_trainer_restarts=1"],
            "failed: the trainer failed 2 times in a row without a new checkpoint (run.max_trainer_restarts=1); "
            "the last time: ",
        ),
    ],
)
def test_a_role_that_is_killed_too_often_ends_the_job_with_its_name(
    job: Job, role: str, overrides: list[str], words: str
):
    job.start("trainer.updates=1000", *overrides)
    job.until(job.updates, "a first update")
    if role == "trainer-0":
        first = job.until(lambda: job.role(role), "a trainer")
        first.kill()
        job.until(lambda: (again := job.role(role)) is not None and again != first, "another trainer")
    process = job.role(role)
    assert process is not None
    killed = time.monotonic()
    process.kill()
    assert job.wait(30) == 1, job.output()
    assert time.monotonic() - killed < 30
    assert f"{role} was killed by SIGKILL" in job.output()
    assert job.summary()["outcome"].startswith(f"{words}{role} was killed by SIGKILL")
    assert_nothing_left(job)


def test_a_worker_that_is_killed_is_started_again_and_takes_up_what_it_had_left(job: Job):
    job.start("trainer.updates=3", "trainer.tensor_parallel=2")
    job.until(job.updates, "a first update")
    job.until(lambda: job.role("rollout-0"), "a worker").kill()
    assert job.wait(400) == 0, job.output()
    assert "started again, time 1 of 3" in job.output()
    summary = job.summary()
    assert [u["version"] for u in summary["updates"]] == [1, 2, 3]
    assert summary["accounting"]["matches"], summary["accounting"]
    assert max(u["logprob_mismatch_max"] or 0.0 for u in summary["updates"]) <= 1e-3  # it never served its old weights
    code, report = job.status()
    assert (code, report["state"]) == (0, "finished")
    restarts = {role["name"]: [each["reason"] for each in role["restarts"]] for role in report["roles"]}
    assert [reason.split(";")[0] for reason in restarts.pop("rollout-0")] == ["was killed by SIGKILL"]
    assert not any(restarts.values())
    assert "restarts:   rollout-0 1" in job.output()
    assert_nothing_left(job)


def test_a_trainer_that_is_killed_starts_again_in_its_job_and_takes_over_finished_groups(job: Job):
    updates = 7
    job.start(f"trainer.updates={updates}", "trainer.tensor_parallel=2", "trainer.checkpoint.every=2")
    latest = job.run_folder / "checkpoints" / "latest"
    job.until(lambda: latest.is_file() and len(job.updates()) >= 3, "a checkpoint, and an update after it")
    worker = job.until(lambda: job.role("rollout-0"), "a worker")
    engine = {each.pid for each in worker.children()}
    job.until(lambda: job.role("trainer-0"), "a trainer").kill()
    job.until(lambda: "all trainer ranks are started again" in job.output(), "another start", 60)
    log = job.run_folder / "logs" / "trainer-0.log"
    went_on = (
        r"goes on from version (\d+): (\d+) groups in flight, (\d+) adopted, (\d+) to be made again; (\d+) episodes"
    )
    found = job.until(lambda: re.search(went_on, log.read_text()), "a take-over")
    version, in_flight, adopted, _, lost = map(int, found.groups())
    assert version >= 2
    assert version % 2 == 0
    assert adopted >= 1
    job.until(lambda: len(job.updates()) > version, "an update of the other trainer")
    assert {each.pid for each in worker.children()} >= engine
    assert job.wait(400) == 0, job.output()
    assert "life 2" not in (job.run_folder / "logs" / "rollout-0.log").read_text()
    assert not wrong_with(job.run_folder, updates, open_at_end=4)
    summary = job.summary()
    assert summary["accounting"]["rolled_back"] == lost
    assert len(episode_log.read_rolled_back(job.run_folder)) == lost
    assert [restart["role"] for restart in summary["restarts"]] == ["trainer-0"]
    assert "was killed by SIGKILL" in summary["restarts"][0]["reason"]
    assert max(u["logprob_mismatch_max"] or 0.0 for u in summary["updates"]) <= 1e-3
    assert min(u["staleness_mean"] for u in summary["updates"]) >= 0
    assert in_flight + adopted <= 4
    state = json.loads(Path(summary["checkpoint"], "state.json").read_text())
    assert state["restart_epoch"] == 1
    client = MlflowClient(f"sqlite:///{job.folder / 'runs' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("megatron_webrl").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert_nothing_left(job)


def test_a_killed_launcher_takes_its_roles_along_and_the_next_start_sweeps_the_ring(job: Job):
    job.start()
    job.until(lambda: rings(job) and job.role("trainer-0"), "a ring and a trainer")
    assert job.process is not None
    job.process.kill()
    job.wait(10)
    deadline = time.monotonic() + 30
    while owned(job.process.pid):
        assert time.monotonic() < deadline, f"left: {owned(job.process.pid)}"
        time.sleep(0.1)
    left, killed = rings(job), job.process.pid
    assert left
    code, report = job.status()
    assert (code, report["state"], report["ended_at"]) == (1, "silent", None)
    assert "does not answer" in report["reason"]
    job.start("trainer.updates=1")
    job.until(lambda: not left[0].exists(), "a sweep", 60)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130, job.output()
    assert job.summary()["outcome"] == "interrupted"
    assert f"removed what a killed run had left: {left[0].name}, webrl-{killed}-" in job.output()
    assert_nothing_left(job)


def test_a_job_whose_control_plane_cannot_start_says_so_at_its_end(job: Job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job.start(f"control.port={taken.getsockname()[1]}")
        assert job.wait(120) == 1, job.output()
    outcome = job.summary()["outcome"]
    assert outcome.startswith("failed: control exited with code 1; last log line: ")
    assert "Address already in use" in outcome
    assert f"state:      {outcome}; " in job.output()
    assert [(event.role, event.event) for event in events.read_events(job.run_folder)] == [
        ("job", "started"), ("control", "started"), ("job", "ended"),
    ]  # fmt: skip
    code, report = job.status()
    assert (code, f"{report['state']}: {report['reason']}") == (1, outcome)
    assert [(role["name"], role["state"]) for role in report["roles"]] == [("control", "failed")]
    assert job.process is not None
    assert not owned(job.process.pid)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("no.such.key=1", "unknown key no"),
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
def test_a_broken_configuration_ends_with_one_line_before_anything_starts(job: Job, override: str, words: str):
    job.start(override)
    assert job.wait(60) == 2
    output = job.output()
    assert words in output
    assert output.count("\n") == 1
    assert not job.run_folder.exists()
