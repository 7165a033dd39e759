"""How benchmarks wait for their jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench import jobs

ENDS_LATER = """
import signal, sys, time
def end(number, frame):
    time.sleep(1.5)  # as an update takes its time
    sys.exit(130)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", ENDS_LATER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_a_job_is_asked_once_to_stop_and_ends_its_update(job: subprocess.Popen[bytes]):
    asked = []
    assert jobs.wait_for_end(job, "job", lambda: asked.append(1) is None, 30)
    assert len(asked) == 1
    assert job.returncode == jobs.STOPPED_EXIT


def test_a_job_that_takes_too_long_is_an_error(job: subprocess.Popen[bytes]):
    with pytest.raises(RuntimeError, match="job slow did not end within 0 s"):
        jobs.wait_for_end(job, "slow", lambda: False, 0.0)


def test_a_job_that_ends_by_itself_was_not_stopped():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert not jobs.wait_for_end(process, "job", lambda: False, 30)


def test_a_job_that_fails_is_an_error_with_its_last_words(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"(?s)job absent ended with exit code 2:.*absent\.yaml"):
        jobs.run_job(tmp_path / "absent.yaml", "absent", [], tmp_path)
