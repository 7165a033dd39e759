"""Whole jobs whose control service is killed or stopped."""

from __future__ import annotations

import signal
import time

import pytest

from tests.finished_runs import run_problems
from tests.launch.whole_jobs import Job, assert_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATES = 12


def test_a_job_continues_when_its_control_service_is_killed_and_stopped(job: Job) -> None:
    job.start(f"trainer.updates={UPDATES}", "run.heartbeat_timeout_seconds=10")
    job.until(lambda: job.role("rollout-0"), "a worker")
    for number in range(1, 4):
        done = len(job.updates())
        job.until(lambda: job.role("control"), "a control service").kill()
        job.until(lambda number=number: f"(restart {number} of 30 an hour)" in job.output(), "a restart")
        job.until(lambda done=done: len(job.updates()) > done, "another update")
    control = job.until(lambda: job.role("control"), "a control service")
    control.send_signal(signal.SIGSTOP)
    time.sleep(15)  # longer than run.heartbeat_timeout_seconds
    control.send_signal(signal.SIGCONT)
    assert job.wait(400) == 0, job.output()
    assert not run_problems(job.run_folder, UPDATES, open_at_end=4)
    for role in ("rollout-0", "trainer-0"):
        assert f"restarting {role}" not in job.output()
        assert f"killing {role}" not in job.output()
    assert_nothing_left(job)
