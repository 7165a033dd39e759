"""Metrics of verdicts, computed again from hand-made ones."""

from __future__ import annotations

import pytest

from megatron_webrl.trainer.metrics.group_statistics import verdict_metrics
from megatron_webrl.types import JudgeStage, Verdict


def stage(name: str, decision: str = "yes", errors: tuple[str, ...] = ()) -> JudgeStage:
    attempts = len(errors) + (decision != "none")
    return JudgeStage(name, "", decision, "", "", "model", attempts=attempts, errors=errors)


def judged(outcome: str, calls: int, dollars: float, seconds: float, *stages: JudgeStage) -> Verdict:
    return Verdict(
        outcome, "first(page, judge)", "rubric", stages=stages, calls=calls, prompt_tokens=100 * calls,
        response_tokens=10 * calls, dollars=dollars, seconds=seconds,
    )  # fmt: skip


VERDICTS = [
    judged("success", 4, 0.25, 2.0, stage("relevance"), stage("rubric", errors=("truncated", "http_429"))),
    judged("success", 2, 0.5, 4.0, stage("relevance", errors=("truncated",))),
    judged("failure", 3, 0.0, 6.0, stage("relevance", "no"), stage("rubric", "no")),
    judged("judge_error", 3, 0.25, 8.0, stage("rubric", "none", ("timeout", "timeout", "bad json"))),
    Verdict("success", "page", seconds=0.001),
    Verdict("browser_crashed", "none"),
]


def test_cost_and_outcomes_are_reported_by_evaluator_and_protocol():
    judge = "verdict/first-page-judge-rubric"
    metrics = verdict_metrics(VERDICTS)
    wanted = {
        "episodes": 4, "rate/success": 0.5, "rate/failure": 0.25, "rate/judge_error": 0.25, "dollars_total": 1.0,
        "calls": 3.0, "calls/success": 3.0, "calls/failure": 3.0, "calls/judge_error": 3.0,
        "prompt_tokens": 300.0, "prompt_tokens/success": 300.0, "prompt_tokens/failure": 300.0,
        "prompt_tokens/judge_error": 300.0,
        "response_tokens": 30.0, "response_tokens/success": 30.0, "response_tokens/failure": 30.0,
        "response_tokens/judge_error": 30.0,
        "dollars": 0.25, "dollars/success": 0.375, "dollars/failure": 0.0, "dollars/judge_error": 0.25,
        "seconds": 5.0, "seconds/success": 3.0, "seconds/failure": 6.0, "seconds/judge_error": 8.0,
    }  # fmt: skip
    found = {name: value for name, value in metrics.items() if name.startswith(judge)}
    assert found == pytest.approx({f"{judge}/{name}": value for name, value in wanted.items()})


def test_an_evaluator_without_a_model_has_outcomes_and_no_cost():
    found = {name: value for name, value in verdict_metrics(VERDICTS).items() if name.startswith("verdict/page/")}
    assert found == {"verdict/page/episodes": 1, "verdict/page/rate/success": 1.0}


def test_an_episode_that_was_not_judged_is_no_verdict():
    assert not [name for name in verdict_metrics(VERDICTS) if name.startswith("verdict/none")]


def test_failed_attempts_are_reported_by_stage_and_error():
    found = {name: value for name, value in verdict_metrics(VERDICTS).items() if name.startswith("judge_stage")}
    assert found == pytest.approx({
        "judge_stage/relevance/questions": 3,
        "judge_stage/relevance/undecided_rate": 0.0,
        "judge_stage/relevance/error_rate/truncated": 1 / 4,
        "judge_stage/rubric/questions": 3,
        "judge_stage/rubric/undecided_rate": 1 / 3,
        "judge_stage/rubric/error_rate/truncated": 1 / 7,
        "judge_stage/rubric/error_rate/http_429": 1 / 7,
        "judge_stage/rubric/error_rate/timeout": 2 / 7,
        "judge_stage/rubric/error_rate/bad-json": 1 / 7,
    })  # fmt: skip
