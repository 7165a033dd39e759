"""While browsers are killed, every episode is accounted for, memory is stable and nothing is left behind."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def soak(folder: Path, episodes: int, parts: int, seconds: float) -> dict[str, Any]:
    """Run a soak with `folder` for temporary files; returns its report."""
    command = [sys.executable, "-m", "tests.browser.soak", str(episodes), "0", str(parts)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=seconds, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def check(report: dict[str, Any], episodes: int) -> None:
    outcomes, kills, counts = report["outcomes"], report["kills"], report["counts"]
    assert sum(outcomes.values()) == episodes, outcomes
    # browser_error: the close event of the page arrived long before that of its browser.
    assert set(outcomes) <= {"success", "browser_crashed", "page_crashed", "browser_error"}, outcomes
    # A browser has at most all six sessions; an episode that has not begun gets another session.
    assert outcomes["success"] >= episodes - 6 * sum(kills.values())
    # Two kills may hit the same browser.
    assert 0 < counts["crashes"] <= kills["browser"] + kills["driver"]
    assert counts["hangs"] == 0
    assert not report["left"]


@pytest.mark.alone
def test_some_episodes_while_browsers_are_killed(tmp_path: Path) -> None:
    check(soak(tmp_path, 60, 1, 400), 60)


@pytest.mark.alone
@pytest.mark.soak
def test_two_thousand_episodes_while_browsers_are_killed(tmp_path: Path) -> None:
    report = soak(tmp_path, 2000, 10, 2800)
    check(report, 2000)
    assert report["kills"]["browser"] == pytest.approx(100, abs=4 * math.sqrt(95))
    (_, own, browsers), *later = report["memory"]
    # The age of the browsers at a measurement is random.
    assert statistics.median(mib for _, mib, _ in later[-3:]) < 1.2 * own
    assert statistics.median(mib for _, _, mib in later[-3:]) < 1.2 * browsers
