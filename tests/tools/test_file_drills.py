"""The short forms of the drills of files; their long forms are `make soak`.

Each is a process of its own: a fork of one that has imported torch and vLLM takes as long as most of what it tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHORT_OR_LONG = pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])], ids=["short", "long"]
)


def figures_of(drill: str, quick: bool, folder: Path) -> dict[str, Any]:
    """The figures of a drill, all of whose goals hold."""
    file = folder / "figures.json"
    command = [sys.executable, "-m", f"tools.drills.{drill}", "--json", str(file), *(["--quick"] if quick else [])]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(file.read_text())
    assert found["problems"] == []
    return dict(found["figures"])


@SHORT_OR_LONG
def test_an_update_costs_the_same_at_the_end_of_a_long_run(quick: bool, tmp_path: Path) -> None:
    assert figures_of("histories", quick, tmp_path)


@SHORT_OR_LONG
def test_a_run_resumes_after_a_crash_at_any_file_operation(quick: bool, tmp_path: Path) -> None:
    assert figures_of("crash_points", quick, tmp_path)["resumed"] > 100


@SHORT_OR_LONG
def test_a_second_launch_and_a_zombie_never_move_a_run_back(quick: bool, tmp_path: Path) -> None:
    found = figures_of("double_start", quick, tmp_path)
    assert found["zombies that ended with an error"] == found["zombies"] > 0


@SHORT_OR_LONG
def test_a_damaged_record_raises_only_errors_of_records(quick: bool, tmp_path: Path) -> None:
    assert figures_of("damaged_records", quick, tmp_path)


@SHORT_OR_LONG
def test_every_writer_survives_a_disk_that_is_full_read_only_or_broken(quick: bool, tmp_path: Path) -> None:
    assert figures_of("file_errors", quick, tmp_path)["failures"] > 100
