"""Verdicts by the page's own reward."""

from __future__ import annotations

import math

import pytest

from megatron_webrl.judge.environment import outcome


@pytest.mark.parametrize("ended", ["done", "answer", "steps_exhausted"])
def test_an_episode_that_ended_by_rule_succeeds_only_with_a_positive_reward(ended: str) -> None:
    assert outcome(0.01, ended) == "success"
    assert outcome(0.0, ended) == "failure"
    assert outcome(-1.0, ended) == "failure"


def test_without_a_reward_only_an_episode_that_the_page_did_not_end_is_a_failure() -> None:
    assert outcome(None, "answer") == outcome(None, "steps_exhausted") == "failure"
    assert outcome(None, "done") == "no_reward"


def test_a_reward_that_is_no_number_masks_the_episode() -> None:
    assert outcome(math.nan, "done") == outcome(math.inf, "done") == "bad_reward"


@pytest.mark.parametrize("ended", ["browser_error", "engine_error", "episode_timeout", "anything_else"])
def test_what_broke_an_episode_off_masks_it_whatever_the_reward(ended: str) -> None:
    assert outcome(1.0, ended) == outcome(None, ended) == ended


@pytest.mark.parametrize("ended", ["success", "failure", ""])
def test_a_verdict_is_no_way_to_end(ended: str) -> None:
    with pytest.raises(ValueError, match="does not say how the episode ended"):
        outcome(1.0, ended)
