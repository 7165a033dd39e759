"""tools/install.sh refuses what it cannot install in one line, before it makes anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_of_version(path: Path, version: str) -> Path:
    """A program that answers the script's question for the version and can do nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {version} || exit 9\n')
    path.chmod(0o755)
    return path


def install(python: object, venv: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools" / "install.sh", venv],
        env={**os.environ, "PYTHON": str(python)}, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.13"])
def test_another_python_is_refused_in_one_line(version: str, tmp_path: Path) -> None:
    python = python_of_version(tmp_path / "python", version)
    refused = install(python, tmp_path / "venv")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"install: Python 3.11 or 3.12 is needed; '{python}' is {version}. Set PYTHON=/path/to/python3.12\n"
    )
    assert not (tmp_path / "venv").exists()


def test_a_missing_python_is_refused_in_one_line(tmp_path: Path) -> None:
    refused = install("/nowhere/python3", tmp_path / "venv")
    assert refused.returncode == 1
    assert refused.stderr.startswith("install: Python 3.11 or 3.12 is needed; '/nowhere/python3' is missing.")
    assert len(refused.stderr.splitlines()) == 1


def test_an_environment_of_the_other_python_is_not_mixed_up(tmp_path: Path) -> None:
    other = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"
    python_of_version(tmp_path / "venv" / "bin" / "python", other)
    refused = install(sys.executable, tmp_path / "venv")
    assert refused.returncode == 1
    assert f"has Python {other}" in refused.stderr
    assert "make clean" in refused.stderr
