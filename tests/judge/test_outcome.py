"""Outcomes by the page's reward and by the reference answer."""

from __future__ import annotations

import math

import pytest

from megatron_webrl.judge.evaluation import answers_match, outcome

REFERENCE = ("$12.50", "$12.50")  # the right answer
CASES = [  # reward, how the episode ended, answer and reference, outcome
    *[(reward, ended, (), expected) for ended in ("done", "answer", "steps_exhausted")
      for reward, expected in ((0.01, "success"), (0.0, "failure"), (-1.0, "failure"))],
    (None, "answer", (), "failure"), (None, "steps_exhausted", (), "failure"), (None, "done", (), "no_reward"),
    (math.nan, "done", (), "bad_reward"), (math.inf, "done", (), "bad_reward"),
    *[(reward, fault, (), fault) for reward in (1.0, None)
      for fault in ("browser_error", "engine_error", "episode_timeout", "anything_else")],
    (None, "answer", ("$12.50", "12.5"), "success"), (None, "answer", ("$12.50", "$12.05"), "failure"),
    (None, "answer", ("$12.50", None), "failure"), (None, "steps_exhausted", REFERENCE, "failure"),
    (0.0, "done", REFERENCE, "failure"), (1.0, "done", REFERENCE, "failure"),
    (None, "browser_error", REFERENCE, "browser_error"),
]  # fmt: skip
MATCHING = [
    ("  larkfield   STORE. ", "Larkfield Store"), ('"Mara Crane"', "Mara Crane"), ("1,234", "1234"),
    ("€ 1,234.50", "€1234.5"), ("€ 1,234.50", "1234.5"), ("1234.0", "1234"), ("09:30", "09:30"), ("\uff11\uff12", "12"),
]  # fmt: skip
DIFFERENT = [
    ("", "Mara"), ("Mara or Jonas", "Mara"), ("Maras", "Mara"), ("12 or 13", "12"), ("12%", "12"), ("$12", "€12"),
    ("1,23", "123"), ("-12", "12"), ("nan", "12"), ("1e3", "1000"), ("9" * 100_000, "9"), ("2026-03-05", "2026-03-06"),
    ("", "."),
]  # fmt: skip


def test_reward_reference_and_end_of_an_episode_give_its_outcome() -> None:
    for reward, ended, answers, expected in CASES:
        assert outcome(reward, ended, *answers) == expected, (reward, ended, answers)
    for ended in ("success", "failure", ""):
        with pytest.raises(ValueError, match="does not say how the episode ended"):
            outcome(1.0, ended)


def test_answers_match_for_any_case_spaces_quotes_and_number_format_only() -> None:
    for answer, reference in (*MATCHING, *DIFFERENT):
        assert answers_match(answer, reference) == ((answer, reference) in MATCHING), (answer[:99], reference)
