"""Each benchmark runs in its quick form and writes its figures; how benchmarks wait for their jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench import jobs

ENDS_LATER = """
import signal, sys, time
def end(number, frame):
    time.sleep(0.5)  # as an update takes its time
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


def test_a_job_is_asked_once_to_stop_and_ends_its_update(
    job: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="job slow did not end within 0 s"):
        jobs.wait_for_end(job, "slow", lambda: False, 0.0)
    asked = []
    assert jobs.wait_for_end(job, "job", lambda: asked.append(1) is None, 30)
    assert len(asked) == 1
    assert job.returncode == jobs.STOPPED_EXIT


def test_a_job_that_ends_by_itself_was_not_stopped_and_one_that_fails_is_an_error(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert not jobs.wait_for_end(process, "job", lambda: False, 30)
    with pytest.raises(RuntimeError, match=r"(?s)job absent ended with exit code 2:.*absent\.yaml"):
        jobs.run_job(tmp_path / "absent.yaml", "absent", [], tmp_path)


SMALL = "training --hidden 64 --layers 2"


@pytest.mark.parametrize(
    "words",
    [
        "browser", "checkpoint", "context", "judge", "packing", "reshard", "ring",
        f"{SMALL} --episodes 1", f"{SMALL} --group-size 2",
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_benchmark_runs_in_its_quick_form(words: str, tmp_path: Path) -> None:
    module, *options = words.split()
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"tools.bench.{module}", "--quick", "--json", str(figures), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
    assert json.loads(figures.read_text())
