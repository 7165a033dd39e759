"""Evaluators and their combinations."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.judge import BudgetConfig, judge_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge import evaluation
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.types import Trajectory, Verdict
from tests.judge.support import ScriptedOracle, episode, judging
from tools.judge_endpoint import server

FREED = threading.Event()  # ends functions that hang
HALF = "broken \ud83d text"  # half of a surrogate pair


async def verdict_of(trajectory: Trajectory, *evaluators: str, **settings_of_judge: Any) -> Verdict:
    settings = judge_config(evaluators=list(evaluators), **settings_of_judge)
    async with open_evaluator(settings, LocalMeter(BudgetConfig())) as evaluator:
        return await evaluator.evaluate(trajectory)


def here(name: str) -> str:
    return f"{__name__}:{name}"


def says_yes(trajectory: Trajectory) -> bool:
    return True


def says_no(trajectory: Trajectory) -> bool:
    return False


def says_nothing(trajectory: Trajectory) -> None:
    return None


def says_masked(trajectory: Trajectory) -> str:
    return "odd_site"


def raises(trajectory: Trajectory) -> bool:
    raise RuntimeError("broken\nmore")


def says_seven(trajectory: Trajectory) -> int:
    return 7


async def says_yes_later(trajectory: Trajectory) -> bool:
    await asyncio.sleep(0)
    return True


def says_verdict(trajectory: Trajectory) -> Verdict:
    return Verdict("failure", "mine", reason="because", dollars=0.5)


def says_masked_by_verdict(trajectory: Trajectory) -> Verdict:
    return Verdict("odd_site", "mine", reason="a captcha")


def says_half_a_character(trajectory: Trajectory) -> Verdict:
    return Verdict("failure", "mine", reason=HALF)


@pytest.mark.parametrize("end", ["browser_error", "engine_error", "episode_timeout", "context_overflow", "aborted"])
async def test_an_episode_with_a_fault_is_never_judged(end: str):
    verdict = await verdict_of(episode(end_reason=end, page_reward=1.0), "page", here("says_yes"), combine="any")
    assert (verdict.outcome, verdict.evaluator) == (end, "none")


@pytest.mark.parametrize(
    ("reward", "answer", "reference", "expected"),
    [(1.0, None, None, "success"), (0.0, None, None, "failure"), (None, None, None, "failure"),
     (None, "12", "12.0", "success"), (None, "13", "12", "failure"), (float("nan"), None, None, "bad_reward")],
)  # fmt: skip
async def test_page_decides_by_reward_or_reference(
    reward: float | None, answer: str | None, reference: str | None, expected: str
):
    verdict = await verdict_of(episode(answer, reference=reference, page_reward=reward), "page")
    assert (verdict.outcome, verdict.evaluator) == (expected, "page")


@pytest.mark.parametrize(
    ("reward", "least", "expected"),
    [(0.2, 0.0, "success"), (0.2, 0.5, "failure"), (0.5, 0.5, "success"), (0.0, 0.0, "failure")],
)
async def test_success_at_says_which_reward_is_a_success(reward: float, least: float, expected: str):
    verdict = await verdict_of(episode(None, reference=None, page_reward=reward), "page", reward_threshold=least)
    assert verdict.outcome == expected


@pytest.mark.parametrize(
    ("evaluator", "answer", "reference", "expected"),
    [("exact_answer", " 12 euros ", "12 euros", "success"), ("exact_answer", "12 Euros", "12 euros", "failure"),
     ("normalized_answer", "12 Euros.", "12 euros", "success"), ("normalized_answer", "13", "12", "failure"),
     ("exact_answer", None, "12", "failure"), ("exact_answer", "12", None, "no_reference"),
     ("normalized_answer", "", "", "no_reference")],
)  # fmt: skip
async def test_answers_are_compared_with_the_reference(
    evaluator: str, answer: str | None, reference: str | None, expected: str
):
    assert (await verdict_of(episode(answer, reference=reference), evaluator)).outcome == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("says_yes", "success"), ("says_no", "failure"), ("says_yes_later", "success"), ("says_nothing", "no_decision"),
     ("says_masked", "odd_site"), ("raises", "judge_error"), ("says_seven", "judge_error")],
)  # fmt: skip
async def test_a_function_by_import_path_decides(name: str, expected: str):
    verdict = await verdict_of(episode(), here(name))
    assert (verdict.outcome, verdict.evaluator) == (expected, here(name))


@pytest.mark.parametrize("evaluator", ["judge", here("says_half_a_character")])
async def test_half_a_character_in_a_verdict_reaches_the_record_as_a_question_mark(
    evaluator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "REASON", HALF)
    async with judging(ScriptedOracle({"supported": False}), {"evaluators": [evaluator]}) as (evaluate, _):
        verdict = await evaluate.evaluate(episode())
    assert verdict.outcome == "failure"
    texts = [verdict.reason, *(stage.text for stage in verdict.stages)]
    assert ["broken ? text" in text for text in texts] == [True] * len(texts)
    judged = replace(episode(), verdict=verdict)
    assert decode_trajectory(b"".join(encode_trajectory(judged))).verdict == verdict


def hangs(trajectory: Trajectory) -> bool:
    return FREED.wait(60)


async def never_ends(trajectory: Trajectory) -> bool:
    await asyncio.Event().wait()
    return True


@pytest.mark.parametrize("name", ["hangs", "never_ends"])
async def test_a_function_that_hangs_masks_the_episode_and_leaves_the_loops_own_threads_free(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluation, "MAX_THREADS", 2)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    settings = judge_config(evaluators=[here(name), here("says_yes")], combine="all", deadline_seconds=0.5)
    FREED.clear()
    try:
        async with open_evaluator(settings, LocalMeter(BudgetConfig())) as evaluator:
            verdicts = await asyncio.gather(*(evaluator.evaluate(episode(ticket=n)) for n in range(3)))
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    finally:
        FREED.set()
    expected = ("judge_error", "no verdict within 0.5 s (judge.deadline_seconds)")
    assert [(verdict.outcome, verdict.reason) for verdict in verdicts] == [expected] * 3
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "evaluator")


async def test_a_function_may_return_a_verdict():
    verdict = await verdict_of(episode(), here("says_verdict"))
    assert (verdict.outcome, verdict.reason, verdict.dollars) == ("failure", "because", 0.5)
    assert verdict.evaluator == here("says_verdict")


@pytest.mark.parametrize(
    ("combine", "names", "expected", "by"),
    [
        ("first", "says_nothing says_no says_yes", "failure", "says_no"),
        ("first", "raises says_yes", "success", "says_yes"),
        ("first", "raises says_nothing", "judge_error", "raises"),
        ("first", "says_masked says_yes", "odd_site", "says_masked"),
        ("first", "says_masked_by_verdict says_yes", "odd_site", "says_masked_by_verdict"),
        ("all", "says_yes says_yes_later", "success", None),
        ("all", "says_yes says_no", "failure", None),
        ("all", "raises says_no", "failure", None),
        ("all", "says_yes raises says_masked", "judge_error", None),
        ("all", "says_yes says_nothing", "no_decision", None),
        ("any", "says_no says_yes", "success", None),
        ("any", "raises says_yes", "success", None),
        ("any", "says_no says_no", "failure", None),
        ("any", "says_no says_masked raises", "odd_site", None),
    ],
)
async def test_combinations_fail_closed(combine: str, names: str, expected: str, by: str | None):
    paths = [here(name) for name in names.split()]
    verdict = await verdict_of(episode(), *paths, combine=combine)
    assert verdict.outcome == expected
    assert verdict.evaluator == (here(by) if by else f"{combine}({', '.join(paths)})")


async def test_first_asks_the_next_evaluator_only_where_the_page_does_not_decide():
    undecided = episode(None, reference=None)
    assert (await verdict_of(undecided, "page", here("says_yes"))).outcome == "success"
    assert (await verdict_of(undecided, "page", here("says_nothing"))).outcome == "no_decision"
    rewarded = episode(None, reference=None, page_reward=0.0)
    assert (await verdict_of(rewarded, "page", here("says_yes"))).outcome == "failure"


async def test_a_combination_keeps_stages_and_costs_of_the_judge_and_spares_it_after_a_failure():
    oracle = ScriptedOracle()
    chosen = {"evaluators": ["page", "judge"], "combine": "all"}
    async with judging(oracle, chosen) as (evaluator, endpoint):
        verdict = await evaluator.evaluate(episode(page_reward=1.0, reference=None))
        assert (verdict.outcome, verdict.evaluator, verdict.protocol) == ("success", "all(page, judge)", "rubric")
        assert (verdict.calls, len(verdict.stages)) == (6, 6)
        verdict = await evaluator.evaluate(episode(page_reward=0.0, reference=None))
        assert (verdict.outcome, verdict.calls, endpoint.requests) == ("failure", 0, 6)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"evaluators": []}, "judge.evaluators is empty"),
        ({"evaluators": ["pages"]}, "'pages' is none of page, exact_answer, normalized_answer, judge"),
        ({"evaluators": ["no.such:thing"]}, "no.such:thing: ModuleNotFoundError"),
        ({"evaluators": [f"{__name__}:nothing"]}, "AttributeError"),
        ({"evaluators": [f"{__name__}:__name__"]}, "is str, not a function"),
        ({"evaluators": ["judge"]}, "judge.verdict.name is empty"),
        ({"evaluators": ["judge"], "prompts": "/nowhere"}, "judge.prompts=/nowhere is not a folder"),
    ],
)
async def test_invalid_evaluators_are_refused_with_one_line(chosen: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        async with open_evaluator(judge_config(**chosen), LocalMeter(BudgetConfig())):
            pass
    assert "\n" not in str(error.value)
