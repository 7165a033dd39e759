"""The endpoint for tests and the benchmark of the judge: they recognise questions, and inject reproducible faults."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tools.bench import judge
from tools.judge_endpoint.faults import FAULTS, FaultPlan, parse_faults


def test_faults_are_drawn_by_seed_request_and_count_at_their_rates():
    plans = [FaultPlan(parse_faults("0.6"), seed) for seed in (1, 1, 2)]
    drawn = [[plan.draw(f"digest {n % 50}") for n in range(6000)] for plan in plans]
    assert drawn[0] == drawn[1] != drawn[2]
    assert plans[0].counts == Counter(fault for fault in drawn[0] if fault)
    for fault in FAULTS:
        assert plans[0].counts[fault] == pytest.approx(0.6 * 6000 / len(FAULTS), rel=0.25)
    assert parse_faults("hang=0.5,empty=0.25") == {"hang": 0.5, "empty": 0.25}
    for text in ("x", "1.5", "-0.1", "hangs=0.1", "hang=0.6,empty=0.6", "hang"):
        with pytest.raises(ValueError, match="--faults="):
            parse_faults(text)


def test_the_benchmark_judges_nothing_wrong_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge, "TIMEOUT_SECONDS", 0.7)
    found = judge.measure_correctness(tmp_path, 24, 3, "0.3", "line")
    assert (found.wrong, found.lost) == (0, 0)
    assert found.right + sum(found.masked.values()) == 24
    assert found.right >= 18
    assert 0.15 < found.fault_rate < 0.45
    assert len(found.faults) > 8
