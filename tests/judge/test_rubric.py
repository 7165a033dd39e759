"""The rubric protocol against an endpoint."""

from __future__ import annotations

import pytest

from megatron_webrl.judge import protocols
from megatron_webrl.types import Verdict
from tests.judge.support import ANSWER_TEXT, ScriptedOracle, episode, judging


def decisions(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [(stage.name, stage.subject, stage.decision) for stage in verdict.stages]


@pytest.mark.parametrize("structured", ["schema", "line"])
async def test_an_episode_succeeds_if_every_stage_passes(structured: str):
    oracle = ScriptedOracle()
    async with judging(oracle, {"structured": structured}) as (evaluator, endpoint):
        verdict = await evaluator.evaluate(episode())
    assert (verdict.outcome, verdict.evaluator, verdict.protocol) == ("success", "judge", "rubric")
    assert decisions(verdict) == [
        ("blocked", "", "no"), ("relevance", "screenshot 1", "yes"), ("relevance", "screenshot 2", "yes"),
        ("supported", "", "yes"), ("rubric", "fact 1", "yes"), ("rubric", "fact 2", "yes"), ("reference", "", "yes"),
    ]  # fmt: skip
    assert verdict.calls == endpoint.requests == 7
    assert verdict.dollars == pytest.approx((verdict.prompt_tokens + 2 * verdict.response_tokens) / 1e6)
    assert verdict.prompt_tokens > 7000  # of images alone, as the endpoint counts them
    assert len({stage.digest for stage in verdict.stages}) == 7
    assert {len(stage.digest) for stage in verdict.stages} == {64}
    assert {stage.text for stage in verdict.stages} == {"The endpoint's oracle decided this."}
    assert len(verdict.prompts) == 16


async def test_questions_carry_their_data_and_the_relevant_screenshots():
    shots = episode().images
    oracle = ScriptedOracle({"relevance": lambda fields, images: images[0] != shots[0]})
    async with judging(oracle) as (evaluator, _):
        await evaluator.evaluate(episode())
    asked = {stage: (fields, images) for stage, fields, images in oracle.asked}
    assert asked["blocked"][1] == list(shots)
    assert asked["supported"][1] == asked["rubric"][1] == asked["reference"][1] == list(shots[1:])
    assert asked["rubric"][0]["FACT"] == "blue"
    assert asked["rubric"][0]["RUBRIC"] == "Colour of the lamp"
    assert asked["reference"][0] == {
        "TASK": "Find price and colour of the lamp.", "ANSWER": ANSWER_TEXT, "REFERENCE": "12 euros",
    }  # fmt: skip
    assert asked["supported"][0]["PAGES"].splitlines()[1] == "screenshot 2: Shop | http://shop.localhost/lamp"
    assert asked["supported"][0]["ACTIONS"].splitlines()[0] == "1. left_click coordinate=[5, 5]; page unchanged"


async def test_a_blocked_episode_is_masked_before_anything_else_is_asked():
    oracle = ScriptedOracle({"blocked": True})
    async with judging(oracle) as (evaluator, _):
        for answer in (ANSWER_TEXT, None):
            verdict = await evaluator.evaluate(episode(answer))
            assert verdict.outcome == "blocked"
    assert oracle.stages == ["blocked", "blocked"]


@pytest.mark.parametrize("answer", [None, "", " \n"])
async def test_an_episode_without_an_answer_is_a_failure_after_the_blocked_stage(answer: str | None):
    oracle = ScriptedOracle()
    async with judging(oracle) as (evaluator, _):
        verdict = await evaluator.evaluate(episode(answer))
    assert (verdict.outcome, verdict.reason) == ("failure", "the agent gave no answer")
    assert oracle.stages == ["blocked"]


async def test_an_unsupported_answer_is_a_failure_without_further_questions():
    oracle = ScriptedOracle({"supported": False})
    async with judging(oracle) as (evaluator, _):
        verdict = await evaluator.evaluate(episode())
    assert (verdict.outcome, oracle.stages[-1]) == ("failure", "supported")


async def test_facts_are_judged_until_the_first_that_fails():
    oracle = ScriptedOracle({"rubric": lambda fields, images: fields["FACT"] != "12 euros"})
    async with judging(oracle) as (evaluator, _):
        verdict = await evaluator.evaluate(episode())
    assert verdict.outcome == "failure"
    assert verdict.reason.startswith("fact 1: ")
    assert oracle.stages.count("rubric") == 1


async def test_a_wrong_reference_answer_is_a_failure_and_none_is_not_asked_for():
    oracle = ScriptedOracle({"reference": False})
    async with judging(oracle) as (evaluator, _):
        assert (await evaluator.evaluate(episode())).outcome == "failure"
        assert (await evaluator.evaluate(episode(reference=None))).outcome == "success"


async def test_a_screenshot_without_a_usable_relevance_is_kept():
    oracle = ScriptedOracle({"relevance": False})
    async with judging(oracle, {"attempts": 1}) as (evaluator, endpoint):
        kept = len(oracle.asked)
        await evaluator.evaluate(episode())
        assert [images for stage, _, images in oracle.asked if stage == "supported"] == [[episode().images[-1]]]
        endpoint._reader._files[0].stages["relevance"] = "changed"  # the endpoint refuses these requests
        verdict = await evaluator.evaluate(episode())
    assert [len(images) for stage, _, images in oracle.asked[kept:] if stage == "supported"] == [1, 3]
    assert verdict.outcome == "success"
    assert [stage.errors for stage in verdict.stages if stage.name == "relevance"] == [("refused_request",)] * 2


async def test_screenshots_are_limited_to_the_last_relevant_ones_and_to_even_samples(monkeypatch: pytest.MonkeyPatch):
    oracle = ScriptedOracle()
    monkeypatch.setattr(protocols, "BLOCKED_SCREENSHOTS", 3)
    many = episode(shots=9)
    async with judging(oracle, {"max_screenshots": 4}) as (evaluator, _):
        await evaluator.evaluate(many)
    asked = {stage: images for stage, _, images in oracle.asked}
    assert asked["supported"] == list(many.images[-4:])
    assert asked["blocked"] == [many.images[0], many.images[4], many.images[8]]


async def test_repeated_screenshots_are_judged_once_and_the_last_one_stays():
    oracle = ScriptedOracle()
    first, second = episode(shots=2).images
    async with judging(oracle) as (evaluator, _):
        verdict = await evaluator.evaluate(episode(images=(first, first, second, second, second)))
    assert [stage.subject for stage in verdict.stages if stage.name == "relevance"] == ["screenshot 2"]
    assert [images for stage, _, images in oracle.asked if stage == "supported"] == [[first, second]]


async def test_an_episode_without_screenshots_and_facts_is_judged_by_its_answer():
    oracle = ScriptedOracle({"reference": False})
    async with judging(oracle) as (evaluator, _):
        verdict = await evaluator.evaluate(episode(images=(), facts=()))
    assert decisions(verdict) == [("blocked", "", "no"), ("supported", "", "yes"), ("reference", "", "no")]
