"""The benchmark of the judge: its oracle, its short form, its arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.judge.support import judging
from tools.bench.judge import correctness
from tools.bench.judge.__main__ import QUICK, missed_a_goal
from tools.bench.judge.correctness import CorrectnessResult
from tools.bench.judge.episodes import KINDS, NumberOracle, make_episode, truth_of
from tools.bench.judge.throughput import GroupTimes, measure_throughput, summarise


async def test_the_truth_of_every_kind_of_episode_is_what_a_faultless_judge_says():
    async with judging(NumberOracle()) as (evaluator, _):
        for number in range(2 * len(KINDS)):
            assert (await evaluator.evaluate(make_episode(number, 3))).outcome == truth_of(number)


def test_the_oracle_refuses_a_question_about_several_episodes():
    fields = {"TASK": "Task 3 of the benchmark", "FACT": "Fact 1 of 4"}
    with pytest.raises(ValueError, match="several episodes"):
        NumberOracle().decide("supported", fields, list(make_episode(4, 2).images))
    with pytest.raises(ValueError, match="of another episode"):
        NumberOracle().decide("rubric", fields, [])


@pytest.mark.parametrize("structured", ["schema", "line"])
def test_the_short_form_judges_nothing_wrong_and_loses_nothing(
    structured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(correctness, "TIMEOUT_SECONDS", 1.0)
    found = correctness.measure_correctness(tmp_path, 24, 3, "0.3", structured)
    assert (found.wrong, found.lost) == (0, 0)
    assert found.right + sum(found.masked.values()) == 24
    assert found.right >= 18
    assert 0.15 < found.fault_rate < 0.45
    assert len(found.faults) > 8


def test_agents_do_not_wait_for_verdicts(tmp_path: Path):
    size = replace(QUICK, latency=1.0, seconds=3.0)
    found = measure_throughput(tmp_path, size)
    # A verdict takes five questions, one after another: agents that waited would have no time for a second group.
    assert found.lag_seconds > size.seconds
    assert found.episodes > size.agents


def test_the_full_form_fails_if_judging_holds_training_up_or_a_verdict_is_wrong():
    steady = summarise([GroupTimes(n, n + 10, n + 24, 10) for n in range(100)], QUICK, 0.0, 1000, 7)
    right = CorrectnessResult(8, 8, 0, 0, {}, 40, 0.3, {}, {}, 1.0)
    assert not missed_a_goal({"line": right}, steady, quick=False)
    assert missed_a_goal({"line": replace(right, wrong=1)}, steady, quick=False)
    assert missed_a_goal({"line": replace(right, lost=1)}, steady, quick=True)
    assert missed_a_goal({"line": right}, replace(steady, held_up=0.01), quick=False)
    assert not missed_a_goal({"line": right}, replace(steady, held_up=0.01), quick=True)


def test_held_up_is_the_growth_of_the_lag_and_the_slowness_of_agents():
    steady = [GroupTimes(n, n + 10, n + 24, 10) for n in range(100)]
    found = summarise(steady, QUICK, 0.0, 1000, 7)
    assert (found.lag_seconds, found.lag_growth, found.agents_slowed, found.held_up) == (14, 0, 0, 0)
    assert found.if_agents_waited == pytest.approx(14 / 24)
    growing = [GroupTimes(n, n + 10, n + 24 + n / 10, 10) for n in range(100)]
    assert summarise(growing, QUICK, 0.0, 1000, 7).lag_growth == pytest.approx(0.1)
    slow = [GroupTimes(n, n + 11, n + 24, 10) for n in range(100)]
    assert summarise(slow, QUICK, 0.0, 1000, 7).agents_slowed == pytest.approx(0.1)
    assert summarise(slow, QUICK, 0.04, 1000, 7).held_up == pytest.approx(0.06)
    assert summarise(slow, QUICK, 0.2, 1000, 7).held_up == 0
