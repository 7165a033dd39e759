"""A run that is killed over and over trains what an undisturbed one would: no ticket lost, skipped or trained twice."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.finished_runs import run_problems
from tests.launch.whole_jobs import Job, assert_nothing_left

KILLS, UPDATES, GROUPS, GROUP_SIZE, STALENESS = 20, 100, 2, 2, 1
LIMIT = 300.0


def versions(job: Job) -> int:
    """Updates that are in a complete checkpoint."""
    latest = job.run_folder / "checkpoints" / "latest"
    return int(latest.read_text().strip().rpartition("-")[2]) if latest.is_file() else 0


def kill_at_random(job: Job, choose: random.Random) -> None:
    """Wait for up to two more checkpoints and a little longer, then kill trainer and worker, or the launcher."""
    assert job.process is not None
    wanted = versions(job) + choose.randrange(3)
    job.until(lambda: job.role("trainer-0") and job.role("rollout-0"), "both roles", LIMIT)
    job.until(lambda: versions(job) >= wanted, f"checkpoint {wanted}", LIMIT)
    moment = time.monotonic() + choose.uniform(0, 5)
    while time.monotonic() < moment and job.process.poll() is None:
        time.sleep(0.01)
    for victim in [job.process.pid] if choose.random() < 0.3 else [job.role("trainer-0"), job.role("rollout-0")]:
        if isinstance(victim, int):
            job.process.send_signal(signal.SIGKILL)
        elif victim is not None:
            victim.kill()
    job.wait(90)
    gone = time.monotonic() + 60
    while job.processes():
        assert time.monotonic() < gone, f"left: {job.processes()}"
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills_lose_no_group_train_none_twice_and_skip_no_task(job: Job) -> None:
    choose = random.Random(0)
    overrides = [f"trainer.updates={UPDATES}", "trainer.checkpoint.every=1", "run.max_trainer_restarts=0"]
    for _ in range(KILLS):
        assert versions(job) < UPDATES - 1, "it is over before the last kill"
        resume = [f"run.resume={'true' if versions(job) else 'false'}"]
        job.start(*overrides, *resume)
        kill_at_random(job, choose)
    job.start(*overrides, "run.resume=true")
    assert job.wait(LIMIT * 4) == 0, job.output()
    assert_nothing_left(job)

    wrong = run_problems(job.run_folder, UPDATES, open_at_end=(STALENESS + 1) * GROUPS)
    assert not wrong, wrong
