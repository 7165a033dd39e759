"""Results of the check: what passes, what fails, table and report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_webrl.checks import report
from megatron_webrl.checks.report import CheckResult

FOUND = [
    report.at_most("model", "logits", 1e-6, 1e-3),
    report.at_least("links", "pair 0-1", 3.0, 20.0, "GB/s", "slow"),
    report.skipped("nodes", "links between nodes", "one node"),
    report.measured("model", "arithmetic", 300.0, "TFLOP/s", 600.0),
]


def test_a_value_beyond_its_limit_or_that_is_no_number_fails() -> None:
    assert [each.status for each in FOUND] == ["passed", "failed", "skipped", "passed"]
    assert report.at_most("a", "b", math.nan, 1.0).status == "failed"
    assert report.at_least("a", "b", math.nan, 1.0).status == "failed"


def test_table_and_report_hold_all_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.report(FOUND) == 1
    text = capsys.readouterr().out
    assert all(each.name in text and each.note in text for each in FOUND)
    assert "2 passed, 1 failed, 1 skipped: links: pair 0-1" in text
    assert report.report(FOUND[:1]) == 0
    report.write_json(tmp_path / "report.json", FOUND, platform="cpu")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["platform"] == "cpu"
    ratios = [each.pop("ratio") for each in found["results"]]
    assert [CheckResult(**each) for each in found["results"]] == FOUND
    assert ratios[3] == 0.5
