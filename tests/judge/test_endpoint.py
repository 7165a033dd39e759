"""The endpoint for tests and the benchmark of the judge: they recognise questions, and inject reproducible faults."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.judge.support import judging
from tests.waiting import until
from tools.bench import judge
from tools.bench.judge_episodes import KINDS, NumberOracle, make_episode, truth_of
from tools.judge_endpoint.faults import FAULTS, FaultPlan, parse_faults
from tools.judge_endpoint.process import ROOT, endpoint_process, stats_of


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


def test_the_process_answers_and_dies_with_its_parent(tmp_path: Path):
    with endpoint_process(tmp_path) as url:
        assert stats_of(url) == {"requests": 0, "replies": {}, "faults": {}, "most_in_flight": 0}
    address = tmp_path / "child.json"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'tools.judge_endpoint', '--address-file', '{address}'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        until(address.exists, "the endpoint")
        parent.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of the endpoint", 10)


async def test_the_truth_of_every_kind_of_episode_is_what_a_faultless_judge_says():
    async with judging(NumberOracle()) as (evaluator, _):
        for number in range(len(KINDS)):
            assert (await evaluator.evaluate(make_episode(number, 3))).outcome == truth_of(number)
    fields = {"TASK": "Task 3 of the benchmark", "FACT": "Fact 1 of 4"}
    with pytest.raises(ValueError, match="several episodes"):
        NumberOracle().decide("supported", fields, list(make_episode(4, 2).images))
    with pytest.raises(ValueError, match="of another episode"):
        NumberOracle().decide("rubric", fields, [])


def test_the_benchmark_judges_nothing_wrong_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge, "TIMEOUT_SECONDS", 1.0)
    found = judge.measure_correctness(tmp_path, 24, 3, "0.3", "line")
    assert (found.wrong, found.lost) == (0, 0)
    assert found.right + sum(found.masked.values()) == 24
    assert found.right >= 18
    assert 0.15 < found.fault_rate < 0.45
    assert len(found.faults) > 8
