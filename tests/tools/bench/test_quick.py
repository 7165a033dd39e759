"""Each benchmark runs in its quick form and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "words",
    [
        "browser",
        "checkpoint",
        "conversion",
        "packing",
        "ring",
        pytest.param("context", marks=pytest.mark.slow),
        pytest.param("judge", marks=pytest.mark.slow),
        pytest.param("reshard", marks=pytest.mark.slow),
        pytest.param("training --hidden 64 --layers 2 --episodes 1", marks=pytest.mark.slow),
        pytest.param("training --hidden 64 --layers 2 --group-size 2", marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_runs_in_its_quick_form(words: str, tmp_path: Path) -> None:
    module, *options = words.split()
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"tools.bench.{module}", "--quick", "--json", str(figures), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
    assert json.loads(figures.read_text())
