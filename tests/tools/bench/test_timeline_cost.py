"""The benchmark of what recording a timeline costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.monitor.made_timelines import write_run
from tools.bench.monitor import timeline_cost


def test_it_charges_each_process_for_its_spans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = write_run(tmp_path).run_folder, tmp_path / "figures.json"
    assert timeline_cost.main(["--run", str(folder), "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert 0 < figures["span_off_us"] < figures["span_us"] < 100
    spans = {each["role"]: each["spans"] for each in figures["processes"]}
    assert spans == {"rollout-0": 16, "trainer-0": 8}
    worker = figures["processes"][0]
    assert worker["cost_seconds"] == pytest.approx(16e-6 * (figures["span_us"] + figures["write_us"]))
    assert worker["share"] == pytest.approx(worker["cost_seconds"] / 30.0)
    assert figures["passed"]
    assert "at most" in capsys.readouterr().out
