"""The benchmark of the judge: its oracle and its short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.judge.support import judging
from tools.bench import judge
from tools.bench.judge_episodes import KINDS, NumberOracle, make_episode, truth_of


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
    monkeypatch.setattr(judge, "TIMEOUT_SECONDS", 1.0)
    found = judge.measure_correctness(tmp_path, 24, 3, "0.3", structured)
    assert (found.wrong, found.lost) == (0, 0)
    assert found.right + sum(found.masked.values()) == 24
    assert found.right >= 18
    assert 0.15 < found.fault_rate < 0.45
    assert len(found.faults) > 8
