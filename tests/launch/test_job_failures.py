"""Whole jobs whose processes are killed."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_webrl.track import episodes
from tests.finished_runs import run_problems
from tests.launch.whole_jobs import Job, assert_nothing_left
from tests.waiting import until

HEARTBEAT_TIMEOUT_SECONDS = 10


@pytest.mark.timeout(900)
def test_control_service_worker_and_trainer_are_restarted_in_their_job_one_after_the_other(job: Job):
    """A smaller test could not show that a whole job trains each group once whichever of its processes fails."""
    job.start(
        "trainer.updates=1000", "trainer.tensor_parallel=2", "trainer.checkpoint.every=2",
        f"run.heartbeat_timeout_seconds={HEARTBEAT_TIMEOUT_SECONDS}",
    )  # fmt: skip
    job.until(job.updates, "a first update", 480)
    kill_and_stop_control(job)
    kill_worker(job)
    lost = kill_trainer(job)
    summary = stop(job, 4)
    assert "instance 3" not in (job.run_folder / "logs" / "rollout-0.log").read_text()
    assert summary["accounting"]["rolled_back"] == lost == len(episodes.read_rolled_back(job.run_folder))
    restarts = [each for each in summary["restarts"] if each["role"] != "control"]
    assert [restart["role"] for restart in restarts] == ["rollout-0", "trainer-0"]
    assert all("killed by SIGKILL" in restart["reason"] for restart in restarts)
    # The worker never served its old weights.
    assert max(u["logprob_mismatch_max"] or 0.0 for u in summary["updates"]) <= 1e-3
    assert min(u["staleness_mean"] for u in summary["updates"]) >= 0
    assert json.loads(Path(summary["checkpoint"], "state.json").read_text())["restart_epoch"] == 1
    report = job.status()[1]
    assert {role["name"]: role["restarts"] for role in report["roles"]}["trainer-1"] == 0
    assert re.search(r"restarts:   .*rollout-0 1", job.output())


def stop(job: Job, open_tickets: int) -> dict[str, Any]:
    """Interrupt the job; returns its summary. Nothing is lost, skipped or trained twice, and nothing is left."""
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(120) == 130, job.output()
    assert run_problems(job.run_folder, len(job.updates()), open_at_end=open_tickets) == ["the outcome is stopped"]
    assert_nothing_left(job)
    return job.summary()


def another_update(job: Job) -> None:
    done = len(job.updates())
    job.until(lambda: len(job.updates()) > done, "another update")


def kill_and_stop_control(job: Job) -> None:
    """Kill the control service, then stop it for longer than heartbeats may be late."""
    job.until(lambda: job.role("control"), "a control service").kill()
    job.until(lambda: "(restart 1 of 30 an hour)" in job.output(), "a restart")
    another_update(job)
    control = job.until(lambda: job.role("control"), "a control service")
    control.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * HEARTBEAT_TIMEOUT_SECONDS)
    control.send_signal(signal.SIGCONT)
    another_update(job)
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
    job.until(lambda: len(job.updates()) > checkpointed(job) > 0, "a checkpoint, and an update after it")
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
    another_update(job)
    assert {each.pid for each in worker.children()} >= engine
    return lost


def checkpointed(job: Job) -> int:
    """The version of the newest complete checkpoint; 0 without one."""
    latest = job.run_folder / "checkpoints" / "latest"
    return int(latest.read_text().strip().rpartition("-")[2]) if latest.is_file() else 0


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


@pytest.mark.soak
@pytest.mark.timeout(1800)  # engines start three times
def test_an_engine_that_keeps_dying_is_given_up_and_the_job_continues_with_the_other_one(job: Job):
    job.start(
        "trainer.updates=1000", "rollout.engines=2", "run.worker_restarts_per_hour=1", "rollout.max_staleness=2",
        "run.heartbeat_timeout_seconds=60",
    )  # fmt: skip
    job.until(lambda: "rollout-1.1" in counted_by_worker(job), "an episode of the engine", 480)
    job.until(lambda: engine_of(job, "rollout-1"), "its engine").kill()
    job.until(lambda: "; restarting rollout-1 (restart 1 of 1 within an hour)" in job.output(), "its restart")
    log = job.run_folder / "logs" / "rollout-1.log"
    job.until(lambda: "instance 2 of this worker" in log.read_text(), "another instance")
    job.until(lambda: engine_of(job, "rollout-1"), "its engine").kill()
    job.until(lambda: "rollout-1 is given up, the job continues with 1 of 2 engines" in job.output(), "a decision")
    made = len(job.updates())
    job.until(lambda: len(job.updates()) >= made + 4, "four more updates")
    report = job.status()[1]
    assert (report["state"], report["healthy"]) == ("running", True)
    assert {role["name"]: role["state"] for role in report["roles"]}["rollout-1"] == "failed"
    stop(job, 6)
    updates, lines = len(job.updates()), episodes.read_lines(job.run_folder)
    assert set(range(2 * updates - 6)) <= {line["ticket"] for line in lines}  # no ticket is left behind
    assert "rollout-0.1" in counted_by_worker(job)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_roles_die_with_a_killed_launcher_and_the_next_launch_removes_the_ring(job: Job):
    job.start()
    job.until(lambda: job.rings() and job.role("trainer-0"), "a ring and a trainer")
    assert job.process is not None
    job.process.kill()
    job.wait(10)
    until(lambda: not job.processes(), lambda: f"the end of {job.processes()}", 30)
    left, killed = job.rings(), job.process.pid
    code, report = job.status()
    assert (code, report["state"], report["ended_at"]) == (1, "silent", None)
    assert "does not respond" in report["reason"]
    job.start("trainer.updates=1")
    job.until(lambda: not left[0].exists(), "a sweep", 60)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130, job.output()
    assert job.summary()["outcome"] == "interrupted"
    assert f"removed leftovers of a killed run: {left[0].name}, webrl-{killed}-" in job.output()
    assert_nothing_left(job)


def kill_at_random(job: Job, choose: random.Random) -> None:
    """Wait for up to two more checkpoints and a little longer, then kill trainer and worker, or the launcher."""
    assert job.process is not None
    wanted = checkpointed(job) + choose.randrange(3)
    job.until(lambda: job.role("trainer-0") and job.role("rollout-0"), "both roles")
    job.until(lambda: checkpointed(job) >= wanted, f"checkpoint {wanted}", 300)
    with suppress(subprocess.TimeoutExpired):
        job.wait(choose.uniform(0, 5))
    if choose.random() < 0.3:
        job.process.kill()
    else:
        for victim in filter(None, [job.role("trainer-0"), job.role("rollout-0")]):
            victim.kill()
    job.wait(90)
    until(lambda: not job.processes(), lambda: f"the end of {job.processes()}", 60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills_lose_no_group_train_none_twice_and_skip_no_task(job: Job) -> None:
    """A run that is killed over and over trains what an undisturbed one would."""
    updates, choose = 100, random.Random(0)
    overrides = [f"trainer.updates={updates}", "trainer.checkpoint.every=1", "run.max_trainer_restarts=0"]
    for _ in range(20):
        assert checkpointed(job) < updates - 1, "it is over before the last kill"
        job.start(*overrides, f"run.resume={'true' if checkpointed(job) else 'false'}")
        kill_at_random(job, choose)
    job.start(*overrides, "run.resume=true")
    assert job.wait(1200) == 0, job.output()
    assert_nothing_left(job)
    assert run_problems(job.run_folder, updates, open_at_end=4) == []
