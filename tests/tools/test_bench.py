"""Each benchmark runs in its quick form and writes its figures; how benchmarks wait for their jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import jobs


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
