"""The benchmark of context policies: how its figures are put together."""

from __future__ import annotations

import pytest

from tools.bench.context import BASE, OURS, ContextResult, PromptStats, show


def found(steps: int, cached: int, trained: int) -> ContextResult:
    return ContextResult("sites/task", (PromptStats(1000, cached, 1),) * steps, 20 * steps, 1, trained, 1020 * steps)


def test_ratios_are_of_totals_and_lengths_of_episodes_are_shown_apart(capsys: pytest.CaptureFixture[str]) -> None:
    show({BASE: [found(2, 0, 2000), found(10, 200, 9000)], OURS: [found(2, 0, 1000), found(10, 800, 1000)]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 episodes, 12 steps (2 to 10, median 10), 20 tokens an answer")
    assert f"| {BASE} | 6000 | 5000 | 16.7% | 1.00 | 1.0 | 45.8 | 1.00 |" in lines
    assert f"| {OURS} | 6000 | 2000 | 66.7% | 2.50 | 1.0 | 8.3 | 5.50 |" in lines
    assert "| 1 to 4 | 1 | 2000 | 2000 | 1.00 |" in lines
    assert "| 9 to 40 | 1 | 8000 | 2000 | 4.00 |" in lines
