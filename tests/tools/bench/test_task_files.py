"""The benchmark of task files, on few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import task_files


def test_a_quick_run_measures_start_memory_peers_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_files, "PROCESSES", 2)
    task_files.main(["--quick", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["rows"] == task_files.QUICK_ROWS
    assert all(figures[key]["private_mib"] < 100 for key in ("node", "tried_10000", "tried_100000"))
    assert set(figures["draws_per_second"]) == set(task_files.SAMPLERS)
    output = capsys.readouterr().out
    assert output.startswith("3,000 rows, ")
    assert "| json.loads of all lines | 1 |" in output
    assert "| start, 100,000 tasks tried | 2 |" in output
