"""Outcomes by the page's reward and by the reference answer."""

from __future__ import annotations

import math

import pytest

from megatron_webrl.judge.evaluation import answers_match, outcome


@pytest.mark.parametrize("ended", ["done", "answer", "steps_exhausted"])
def test_an_episode_with_a_regular_end_succeeds_only_with_a_positive_reward(ended: str) -> None:
    assert outcome(0.01, ended) == "success"
    assert outcome(0.0, ended) == "failure"
    assert outcome(-1.0, ended) == "failure"


def test_without_a_reward_only_an_episode_that_the_page_did_not_end_is_a_failure() -> None:
    assert outcome(None, "answer") == outcome(None, "steps_exhausted") == "failure"
    assert outcome(None, "done") == "no_reward"


def test_a_reward_that_is_not_finite_masks_the_episode() -> None:
    assert outcome(math.nan, "done") == outcome(math.inf, "done") == "bad_reward"


@pytest.mark.parametrize("ended", ["browser_error", "engine_error", "episode_timeout", "anything_else"])
def test_a_fault_masks_the_episode_for_any_reward(ended: str) -> None:
    assert outcome(1.0, ended) == outcome(None, ended) == ended


@pytest.mark.parametrize("ended", ["success", "failure", ""])
def test_a_verdict_is_not_an_end_reason(ended: str) -> None:
    with pytest.raises(ValueError, match="does not say how the episode ended"):
        outcome(1.0, ended)


def test_a_task_with_a_reference_succeeds_only_by_the_right_answer() -> None:
    assert outcome(None, "answer", "$12.50", "12.5") == "success"
    assert outcome(None, "answer", "$12.50", "$12.05") == "failure"
    assert outcome(None, "answer", "$12.50", None) == "failure"
    assert outcome(None, "steps_exhausted", "$12.50", "$12.50") == "failure"
    assert outcome(0.0, "done", "$12.50", "$12.50") == "failure"
    assert outcome(1.0, "done", "$12.50", "$12.50") == "failure"
    assert outcome(None, "browser_error", "$12.50", "$12.50") == "browser_error"


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("  larkfield   STORE. ", "Larkfield Store"),
        ('"Mara Crane"', "Mara Crane"),
        ("1,234", "1234"),
        ("€ 1,234.50", "€1234.5"),
        ("€ 1,234.50", "1234.5"),
        ("1234.0", "1234"),
        ("09:30", "09:30"),
        ("\uff11\uff12", "12"),
    ],
)
def test_answers_match_for_any_case_spaces_quotes_and_number_format(answer: str, reference: str) -> None:
    assert answers_match(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("", "Mara"),
        ("Mara or Jonas", "Mara"),
        ("Maras", "Mara"),
        ("12 or 13", "12"),
        ("12%", "12"),
        ("$12", "€12"),
        ("1,23", "123"),
        ("-12", "12"),
        ("nan", "12"),
        ("1e3", "1000"),
        ("9" * 100_000, "9"),
        ("2026-03-05", "2026-03-06"),
        ("", "."),
    ],
)
def test_answers_that_hedge_or_differ_do_not_match(answer: str, reference: str) -> None:
    assert not answers_match(answer, reference)
