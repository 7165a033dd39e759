"""Metrics of verdicts, computed again from hand-made ones."""

from __future__ import annotations

import pytest

from megatron_webrl.trainer.metrics.group_statistics import verdict_metrics
from megatron_webrl.types import Verdict


def judged(outcome: str, calls: int, dollars: float, seconds: float) -> Verdict:
    return Verdict(
        outcome, "first(page, judge)", "rubric", calls=calls, prompt_tokens=100 * calls, response_tokens=10 * calls,
        dollars=dollars, seconds=seconds,
    )  # fmt: skip


VERDICTS = [
    judged("success", 4, 0.25, 2.0),
    judged("success", 2, 0.5, 4.0),
    judged("failure", 3, 0.0, 6.0),
    judged("judge_error", 3, 0.25, 8.0),
    Verdict("success", "page", seconds=0.001),
    Verdict("browser_crashed", "none"),
]


def test_cost_and_outcomes_are_reported_by_evaluator_and_protocol():
    judge = "verdict/first-page-judge-rubric"
    metrics = verdict_metrics(VERDICTS)
    wanted = {
        "episodes": 4, "rate/success": 0.5, "rate/failure": 0.25, "rate/judge_error": 0.25, "dollars_total": 1.0,
        "calls": 3.0, "prompt_tokens": 300.0, "response_tokens": 30.0, "dollars": 0.25, "seconds": 5.0,
    }  # fmt: skip
    found = {name: value for name, value in metrics.items() if name.startswith(judge)}
    assert found == pytest.approx({f"{judge}/{name}": value for name, value in wanted.items()})


def test_an_evaluator_without_a_model_has_outcomes_and_no_cost():
    found = {name: value for name, value in verdict_metrics(VERDICTS).items() if name.startswith("verdict/page/")}
    assert found == {"verdict/page/episodes": 1, "verdict/page/rate/success": 1.0}


def test_an_episode_that_was_not_judged_is_no_verdict():
    assert not [name for name in verdict_metrics(VERDICTS) if name.startswith("verdict/none")]
