"""Whole jobs whose processes are killed or cannot start."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

from megatron_webrl.track import episodes, events
from tests.finished_runs import run_problems
from tests.launch.whole_jobs import Job, assert_nothing_left

WITH_CONTROL_PORT = """
import sys
from megatron_webrl.cli import main
from megatron_webrl.launch import first_node
first_node.LOCAL_PORT = {port}
sys.exit(main())
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEARTBEAT_TIMEOUT_SECONDS = 10


@pytest.mark.parametrize(
    ("role", "overrides", "outcome"),
    [
        ("rollout-0", ["run.worker_restarts_per_hour=0"], "failed: "),
        (
            "trainer-0",
            ["run.max_trainer_restarts=1"],
            "failed: the trainer failed 2 times in a row without a new checkpoint (run.max_trainer_restarts=1); "
            "the last time: ",
        ),
    ],
)
def test_a_role_that_is_killed_too_often_ends_the_job_with_its_name(
    job: Job, role: str, overrides: list[str], outcome: str
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
    assert f"{role} killed by SIGKILL" in job.output()
    assert job.summary()["outcome"].startswith(f"{outcome}{role} killed by SIGKILL")
    assert_nothing_left(job)


@pytest.mark.timeout(1800)  # engines start three times
def test_an_engine_that_keeps_dying_is_given_up_and_the_job_continues_with_the_other_one(job: Job):
    job.start(
        "trainer.updates=1000",
        "rollout.engines=2",
        "run.worker_restarts_per_hour=1",
        "rollout.max_staleness=2",
        "run.heartbeat_timeout_seconds=60",
    )
    log = job.run_folder / "logs" / "rollout-1.log"
    given_up = "rollout-1 is given up, the job continues with 1 of 2 engines"
    job.until(lambda: "rollout-1.1" in counted_by_worker(job), "an episode of the engine", 480)
    job.until(lambda: engine_of(job, "rollout-1"), "its engine").kill()
    job.until(lambda: "; restarting rollout-1 (restart 1 of 1 within an hour)" in job.output(), "its restart")
    job.until(lambda: "instance 2 of this worker" in log.read_text(), "another instance")
    job.until(lambda: engine_of(job, "rollout-1"), "its engine").kill()
    job.until(lambda: given_up in job.output(), "a decision")
    made = len(job.updates())
    job.until(lambda: len(job.updates()) >= made + 4, "four more updates")
    report = job.status()[1]
    assert (report["state"], report["healthy"]) == ("running", True)
    assert {role["name"]: role["state"] for role in report["roles"]}["rollout-1"] == "failed"
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(120) == 130, job.output()
    updates = len(job.updates())
    assert run_problems(job.run_folder, updates, open_at_end=6) == ["the outcome is stopped"]
    lines = episodes.read_lines(job.run_folder)
    adopted = {line["ticket"] for line in lines if line["worker"] == "rollout-0.1"}
    assert set(range(2 * updates - 6)) <= {line["ticket"] for line in lines}  # no ticket is left behind
    assert adopted
    assert job.output().count("rollout-1 is given up") == 1
    assert_nothing_left(job)


def counted_by_worker(job: Job) -> set[str]:
    """Worker instances with a counted episode."""
    path = job.run_folder / "episodes.jsonl"
    return {line["worker"] for line in episodes.read_lines(job.run_folder)} if path.is_file() else set()


def engine_of(job: Job, worker: str) -> psutil.Process | None:
    """The vLLM process of a worker."""
    with suppress(psutil.NoSuchProcess):
        role = job.role(worker)
        for child in role.children() if role is not None else ():
            if "EngineCore" in " ".join([child.name(), *child.cmdline()]):
                return child
    return None


@pytest.mark.timeout(900)
def test_control_service_worker_and_trainer_are_restarted_in_their_job_one_after_the_other(job: Job):
    """A smaller test could not show that a whole job trains each group once whichever of its processes fails."""
    updates = 24
    job.start(
        f"trainer.updates={updates}", "trainer.tensor_parallel=2", "trainer.checkpoint.every=2",
        f"run.heartbeat_timeout_seconds={HEARTBEAT_TIMEOUT_SECONDS}",
    )  # fmt: skip
    job.until(job.updates, "a first update")
    kill_and_stop_control(job)
    kill_worker(job)
    lost = kill_trainer(job)
    assert job.wait(400) == 0, job.output()
    assert "instance 3" not in (job.run_folder / "logs" / "rollout-0.log").read_text()
    assert not run_problems(job.run_folder, updates, open_at_end=4)
    summary = job.summary()
    assert summary["accounting"]["rolled_back"] == lost
    assert len(episodes.read_rolled_back(job.run_folder)) == lost
    restarts = [each for each in summary["restarts"] if each["role"] != "control"]
    assert [restart["role"] for restart in restarts] == ["rollout-0", "trainer-0"]
    assert all("killed by SIGKILL" in restart["reason"] for restart in restarts)
    # The worker never served its old weights.
    assert max(u["logprob_mismatch_max"] or 0.0 for u in summary["updates"]) <= 1e-3
    assert min(u["staleness_mean"] for u in summary["updates"]) >= 0
    state = json.loads(Path(summary["checkpoint"], "state.json").read_text())
    assert state["restart_epoch"] == 1
    code, report = job.status()
    assert (code, report["state"]) == (0, "finished")
    restarts = [
        (each["role"], each["reason"].split(";")[0]) for each in report["events"] if each["event"] == "restarted"
    ]
    assert ("rollout-0", "rollout-0 killed by SIGKILL") in restarts
    assert {role["name"]: role["restarts"] for role in report["roles"]}["trainer-1"] == 0
    assert re.search(r"restarts:   .*rollout-0 1", job.output())
    client = MlflowClient(f"sqlite:///{job.folder / 'runs' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("megatron_webrl").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert_nothing_left(job)


def kill_and_stop_control(job: Job) -> None:
    """Kill the control service three times, then stop it for longer than heartbeats may be late."""
    for number in range(1, 4):
        done = len(job.updates())
        job.until(lambda: job.role("control"), "a control service").kill()
        job.until(lambda number=number: f"(restart {number} of 30 an hour)" in job.output(), "a restart")
        job.until(lambda done=done: len(job.updates()) > done, "another update")
    control = job.until(lambda: job.role("control"), "a control service")
    control.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * HEARTBEAT_TIMEOUT_SECONDS)
    control.send_signal(signal.SIGCONT)
    done = len(job.updates())
    job.until(lambda: len(job.updates()) > done, "another update")
    for role in ("rollout-0", "trainer-0"):
        assert f"restarting {role}" not in job.output()
        assert f"killing {role}" not in job.output()


def kill_worker(job: Job) -> None:
    """Kill the worker; its next instance runs its unfinished tickets."""
    job.until(lambda: job.role("rollout-0"), "a worker").kill()
    job.until(lambda: "rollout-0.2" in counted_by_worker(job), "an episode of the next instance")
    assert "restarting rollout-0 (restart 1 of 6 within an hour)" in job.output()


def kill_trainer(job: Job) -> int:
    """Kill a trainer rank; all ranks resume in the job and adopt finished groups. Returns the episodes rolled back."""
    latest, done = job.run_folder / "checkpoints" / "latest", len(job.updates())
    job.until(lambda: latest.is_file() and len(job.updates()) >= done + 3, "a checkpoint, and an update after it")
    worker = job.until(lambda: job.role("rollout-0"), "a worker")
    engine = {each.pid for each in worker.children()}
    job.until(lambda: job.role("trainer-0"), "a trainer").kill()
    job.until(lambda: "restarting all trainer ranks" in job.output(), "another start", 60)
    log = job.run_folder / "logs" / "trainer-0.log"
    resumed = r"resumes from version (\d+): (\d+) groups in flight, (\d+) adopted, (\d+) reissued; (\d+) episodes"
    found = job.until(lambda: re.search(resumed, log.read_text()), "a resume")
    version, in_flight, adopted, _, lost = map(int, found.groups())
    assert version >= 2
    assert version % 2 == 0
    assert adopted >= 1
    assert in_flight + adopted <= 4
    job.until(lambda: len(job.updates()) > version, "an update of the other trainer")
    assert {each.pid for each in worker.children()} >= engine
    return lost


def test_roles_die_with_a_killed_launcher_and_the_next_launch_removes_the_ring(job: Job):
    job.start()
    job.until(lambda: job.rings() and job.role("trainer-0"), "a ring and a trainer")
    assert job.process is not None
    job.process.kill()
    job.wait(10)
    deadline = time.monotonic() + 30
    while job.processes():
        assert time.monotonic() < deadline, f"left: {job.processes()}"
        time.sleep(0.1)
    left, killed = job.rings(), job.process.pid
    assert left
    code, report = job.status()
    assert (code, report["state"], report["ended_at"]) == (1, "silent", None)
    assert "does not respond" in report["reason"]
    job.start("trainer.updates=1")
    job.until(lambda: not left[0].exists(), "a sweep", 60)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130, job.output()
    assert job.summary()["outcome"] == "interrupted"
    assert f"removed leftovers of a killed run: {left[0].name}, webrl-{killed}-" in job.output()
    assert_nothing_left(job)


def test_a_control_service_that_cannot_start_is_named_in_the_outcome(job: Job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job.start(program=("-c", WITH_CONTROL_PORT.format(port=port)))
        assert job.wait(120) == 1, job.output()
    outcome = job.summary()["outcome"]
    assert outcome.startswith("failed: control exited with code 2; last log line: ")
    assert "Address already in use" in outcome
    assert f"state:      {outcome}; " in job.output()
    assert [(event.role, event.event) for event in events.read_events(job.run_folder)] == [
        ("job", "started"), ("control", "started"), ("job", "ended"),
    ]  # fmt: skip
    code, report = job.status()
    assert (code, f"{report['state']}: {report['reason']}") == (1, outcome)
    assert [(role["name"], role["state"]) for role in report["roles"]] == [("control", "failed")]
    assert job.process is not None
    assert not job.processes()
