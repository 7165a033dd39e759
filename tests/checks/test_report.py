"""Results of the check: what passes, what fails, table and report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_webrl.checks import report
from megatron_webrl.checks.gpu_links import judge_speeds, pair_rounds
from megatron_webrl.checks.gpu_speed import check_peak, estimated_bytes
from megatron_webrl.checks.report import CheckResult
from megatron_webrl.placement.memory_estimate import MemoryUse

FOUND = [
    report.at_most("one GPU", "logits", 1e-6, 1e-3),
    report.at_least("links", "pair 0-1", 3.0, 20.0, "GB/s", "slow"),
    report.skipped("nodes", "links between nodes", "one node"),
    report.measured("speed", "arithmetic", 300.0, "TFLOP/s", 600.0),
]


def test_a_value_beyond_its_limit_or_that_is_no_number_fails() -> None:
    assert [each.status for each in FOUND] == ["passed", "failed", "skipped", "passed"]
    assert report.at_most("a", "b", math.nan, 1.0).status == "failed"
    assert report.at_least("a", "b", math.nan, 1.0).status == "failed"


def test_the_table_names_every_check_with_its_ratio_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.report(FOUND) == 1
    text = capsys.readouterr().out
    for each in FOUND:
        assert each.name in text
        assert each.note in text
    assert "0.50" in text
    assert "2 passed, 1 failed, 1 skipped: links: pair 0-1" in text
    assert report.report(FOUND[:1]) == 0


def test_a_report_holds_all_results_and_is_written_whole(tmp_path: Path) -> None:
    report.write_json(tmp_path / "report.json", FOUND, platform="cpu")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["platform"] == "cpu"
    ratios = [each.pop("ratio") for each in found["results"]]
    assert [CheckResult(**each) for each in found["results"]] == FOUND
    assert ratios[3] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(("count", "rounds"), [(2, 1), (3, 3), (4, 3), (8, 7)])
def test_rounds_of_disjoint_pairs_cover_all_pairs_once(count: int, rounds: int) -> None:
    found = pair_rounds(count)
    assert len(found) == rounds
    for pairs in found:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))
    flat = [pair for pairs in found for pair in pairs]
    assert sorted(flat) == [(first, second) for first in range(count) for second in range(first + 1, count)]


def test_a_pair_far_below_the_others_or_the_minimum_is_a_slow_link() -> None:
    speeds = {"0-1": 100.0, "0-2": 110.0, "1-2": 30.0}
    limits = dict.fromkeys(speeds, 200.0)
    fast, faster, slow = judge_speeds(speeds, limits, 0.0)
    assert (fast.status, fast.ratio, faster.status) == ("passed", 0.5, "passed")
    assert (slow.status, slow.name) == ("failed", "pair 1-2")
    assert "slow: below 50 GiB/s" in slow.note
    assert [each.status for each in judge_speeds(speeds, limits, 105.0)] == ["failed", "passed", "failed"]


def test_the_estimate_of_a_pass_has_no_optimizer_and_no_buffers() -> None:
    use = MemoryUse("trainer", parameters=1, gradients=2, optimizer=100, activations=4, images=8, buffers=100)
    assert estimated_bytes(use) == 1 + 2 + 4 + 8


def test_memory_more_than_a_tenth_above_the_estimate_fails() -> None:
    assert check_peak("layers", 10.9, 10.0).status == "passed"
    exceeded = check_peak("layers", 11.1, 10.0)
    assert exceeded.status == "failed"
    assert "more than 10 % above the estimate" in exceeded.note
