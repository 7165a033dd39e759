"""Fault drills as tests: each breaks something under a real job, and finds that all is as promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.slurm.virtual_slurm import why_not
from tools.drills.__main__ import run_drills
from tools.drills.faults import DRILLS

ROOT = Path(__file__).parents[2]


def drill(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "tools" / "drill.sh"), *arguments]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin:/usr/sbin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_lists_its_drills_and_refuses_others() -> None:
    assert [line.split()[0] for line in drill("--list").stdout.splitlines()] == list(DRILLS)
    refused = drill("flood")
    assert refused.returncode == 2
    assert "flood is not one of engine, browsers" in refused.stderr


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(why_not(namespaces=True)), reason=why_not(namespaces=True) or "-")
@pytest.mark.parametrize("name", DRILLS)
def test_a_job_survives(name: str, tmp_path: Path) -> None:
    (result,) = run_drills([DRILLS[name]], tmp_path)
    assert result.passed, result
