"""Evaluators and their combinations; outcomes by reward and reference answer."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from megatron_webrl.config.judge import BudgetConfig, judge_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge import evaluation
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import answers_match, open_evaluator, outcome
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


def says(found: Any) -> Callable[[Trajectory], Any]:
    return lambda trajectory: found


says_yes, says_no, says_nothing, says_masked, says_seven = map(says, (True, False, None, "odd_site", 7))
says_verdict = says(Verdict("failure", "mine", reason="because", dollars=0.5))
says_as_much_as_a_success = says(Verdict("failure", "mine", credit=1.0))
says_masked_by_verdict = says(Verdict("odd_site", "mine"))
says_undecided_by_verdict = says(Verdict("no_decision", "mine"))
says_half_a_character = says(Verdict("failure", "mine", reason=HALF))


def raises(trajectory: Trajectory) -> bool:
    raise RuntimeError("broken\nmore")


async def says_yes_later(trajectory: Trajectory) -> bool:
    await asyncio.sleep(0)
    return True


async def test_an_episode_with_a_fault_is_never_judged():
    for end in ("browser_error", "aborted"):
        verdict = await verdict_of(episode(end_reason=end, page_reward=1.0), "page", here("says_yes"), combine="any")
        assert (verdict.outcome, verdict.evaluator) == (end, "none")


ANSWERS = [  # evaluator, answer, reference, outcome
    ("page", "12", "12.0", "success"), ("page", "13", "12", "failure"),
    ("exact_answer", " 12 euros ", "12 euros", "success"), ("exact_answer", "12 Euros", "12 euros", "failure"),
    ("normalized_answer", "12 Euros.", "12 euros", "success"), ("normalized_answer", "13", "12", "failure"),
    ("exact_answer", None, "12", "failure"), ("exact_answer", "12", None, "no_reference"),
    ("normalized_answer", "", " ", "no_reference"),
    (here("says_yes"), None, None, "success"), (here("says_no"), None, None, "failure"),
    (here("says_yes_later"), None, None, "success"), (here("says_nothing"), None, None, "no_decision"),
    (here("says_masked"), None, None, "odd_site"), (here("raises"), None, None, "judge_error"),
    (here("says_seven"), None, None, "judge_error"), (here("says_as_much_as_a_success"), None, None, "judge_error"),
    (here("says_verdict"), None, None, "failure"),
]  # fmt: skip


async def test_each_evaluator_decides_by_reward_reference_or_function():
    for evaluator, answer, reference, expected in ANSWERS:
        verdict = await verdict_of(episode(answer, reference=reference), evaluator)
        assert (verdict.outcome, verdict.evaluator) == (expected, evaluator), (answer, reference)
    assert (verdict.reason, verdict.dollars) == ("because", 0.5)
    for reward, threshold, expected in (
        (1.0, 0.0, "success"), (0.0, 0.0, "failure"), (None, 0.0, "failure"), (math.nan, 0.0, "bad_reward"),
        (0.2, 0.0, "success"), (0.2, 0.5, "failure"), (0.5, 0.5, "success"),
    ):  # fmt: skip
        one = episode(None, reference=None, page_reward=reward)
        assert (await verdict_of(one, "page", reward_threshold=threshold)).outcome == expected, (reward, threshold)


@pytest.mark.parametrize("evaluator", ["judge", here("says_half_a_character")])
async def test_half_a_character_becomes_a_question_mark(evaluator: str, monkeypatch: pytest.MonkeyPatch):
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
async def test_a_function_that_hangs_masks_the_episode_and_blocks_no_thread(name: str, monkeypatch: pytest.MonkeyPatch):
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


async def test_a_function_that_returns_or_raises_leaves_its_thread_to_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "MAX_THREADS", 1)
    for name, expected in (("says_yes", "success"), ("raises", "judge_error")):
        settings = judge_config(evaluators=[here(name)], deadline_seconds=20.0)
        async with open_evaluator(settings, LocalMeter(BudgetConfig())) as evaluator, asyncio.timeout(10):
            for _ in range(2):
                assert (await evaluator.evaluate(episode())).outcome == expected


COMBINED = [  # how, evaluators, outcome, the one that decides
    ("first", "says_nothing says_no says_yes", "failure", "says_no"),
    ("first", "raises says_yes", "success", "says_yes"), ("first", "raises says_nothing", "judge_error", "raises"),
    ("first", "says_masked says_yes", "odd_site", "says_masked"),
    ("first", "says_masked_by_verdict says_yes", "odd_site", "says_masked_by_verdict"),
    ("first", "says_undecided_by_verdict says_yes", "success", "says_yes"),
    ("all", "says_yes says_yes_later", "success", None), ("all", "says_yes says_no", "failure", None),
    ("all", "raises says_no", "failure", None), ("all", "says_yes raises says_masked", "judge_error", None),
    ("all", "says_yes says_nothing", "no_decision", None),
    ("any", "says_no says_yes", "success", None), ("any", "raises says_yes", "success", None),
    ("any", "says_no says_no", "failure", None), ("any", "says_no says_masked raises", "odd_site", None),
]  # fmt: skip


async def test_combinations_fail_closed():
    for combine, names, expected, by in COMBINED:
        paths = [here(name) for name in names.split()]
        verdict = await verdict_of(episode(), *paths, combine=combine)
        assert verdict.outcome == expected, (combine, names)
        assert verdict.evaluator == (here(by) if by else f"{combine}({', '.join(paths)})")


async def test_first_asks_the_next_evaluator_only_where_one_does_not_decide():
    other = here("says_yes")
    for evaluator, answer, reference, reward, expected, by in (
        ("page", None, None, None, "success", other), ("page", None, None, 0.0, "failure", "page"),
        ("page", None, None, math.nan, "success", other), ("page", "13", "12", None, "failure", "page"),
        ("exact_answer", "12", None, None, "success", other),
        ("exact_answer", None, "12", None, "failure", "exact_answer"),
        ("exact_answer", "13", "12", None, "failure", "exact_answer"),
    ):  # fmt: skip
        one = episode(answer, reference=reference, page_reward=reward)
        verdict = await verdict_of(one, evaluator, other)
        assert (verdict.outcome, verdict.evaluator) == (expected, by), (evaluator, answer, reference, reward)
    for faults, expected, by in (({"empty": 1.0}, "success", other), ({}, "failure", "judge")):
        chosen = {"evaluators": ["judge", other], "attempts": 1}
        async with judging(ScriptedOracle({"supported": False}), chosen, faults=faults) as (evaluator, _):
            verdict = await evaluator.evaluate(episode())
        assert (verdict.outcome, verdict.evaluator) == (expected, by)
        assert verdict.calls >= 1  # what the judge has cost


async def test_a_combination_keeps_stages_and_costs_of_the_judge_and_spares_it_after_a_failure():
    oracle = ScriptedOracle()
    chosen = {"evaluators": ["page", "judge"], "combine": "all"}
    async with judging(oracle, chosen) as (evaluator, endpoint):
        verdict = await evaluator.evaluate(episode(page_reward=1.0, reference=None))
        assert (verdict.outcome, verdict.evaluator, verdict.protocol) == ("success", "all(page, judge)", "rubric")
        assert (verdict.calls, len(verdict.stages)) == (6, 6)
        verdict = await evaluator.evaluate(episode(page_reward=0.0, reference=None))
        assert (verdict.outcome, verdict.calls, endpoint.requests) == ("failure", 0, 6)


async def test_invalid_evaluators_are_refused_with_one_line():
    for evaluators, words in (
        ([], "judge.evaluators"), (["pages"], "'pages'"), (["no.such:thing"], "no.such cannot be imported"),
        ([here("nothing")], "has no nothing"), ([here("__name__")], "of type str"), (["judge"], "judge.verdict.name"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words) as error:
            await verdict_of(episode(), *evaluators)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"judge.prompts=/nowhere"):
        await verdict_of(episode(), "judge", prompts="/nowhere")


REFERENCE = ("$12.50", "$12.50")  # the right answer
OUTCOMES = [  # reward, how the episode ended, answer and reference, outcome
    *[(reward, ended, (), expected) for ended in ("done", "answer", "steps_exhausted")
      for reward, expected in ((0.01, "success"), (0.0, "failure"), (-1.0, "failure"))],
    (None, "answer", (), "failure"), (None, "steps_exhausted", (), "failure"), (None, "done", (), "no_reward"),
    (math.nan, "done", (), "bad_reward"), (math.inf, "done", (), "bad_reward"),
    *[(reward, fault, (), fault) for reward in (1.0, None) for fault in ("browser_error", "anything_else")],
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
    ("1,23", "123"), ("-12", "12"), ("nan", "12"), ("1e3", "1000"), ("9" * 100_000, "9"), ("", "."),
]  # fmt: skip


def test_reward_reference_and_end_of_an_episode_give_its_outcome():
    for reward, ended, answers, expected in OUTCOMES:
        assert outcome(reward, ended, *answers) == expected, (reward, ended, answers)
    for ended in ("success", "failure", ""):
        with pytest.raises(ValueError, match="does not say how the episode ended"):
            outcome(1.0, ended)


def test_answers_match_for_any_case_spaces_quotes_and_number_format_only():
    for answer, reference in (*MATCHING, *DIFFERENT):
        assert answers_match(answer, reference) == ((answer, reference) in MATCHING), (answer[:99], reference)
