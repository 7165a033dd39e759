"""The protocols rubric, WebJudge and WebVoyager against an endpoint."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from itertools import starmap
from typing import Any, cast

import pytest
from aiohttp import web

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.judge import protocols
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import open_evaluator, with_verdict
from megatron_webrl.judge.questions import MAX_FIELD_CHARS, EpisodeView
from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.types import RubricFact, Verdict
from megatron_webrl.util.image_type import data_url
from tests.judge.support import ANSWER_TEXT, ScriptedOracle, episode, judging, serving, settings

REASON = "The endpoint's oracle decided this."


def decisions(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [(stage.name, stage.subject, stage.decision) for stage in verdict.stages]


@pytest.mark.parametrize("structured", ["schema", "line"])
async def test_an_episode_succeeds_if_every_stage_passes(structured: str):
    async with judging(ScriptedOracle(), {"structured": structured}) as (evaluator, endpoint):
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
    assert {(len(stage.digest), stage.text) for stage in verdict.stages} == {(64, REASON)}
    assert len(verdict.prompts) == 16


async def test_questions_carry_their_data_and_the_relevant_screenshots():
    shots = episode().images
    oracle = ScriptedOracle({"relevance": lambda fields, images: images[0] != shots[0]})
    async with judging(oracle) as (evaluator, _):
        await evaluator.evaluate(episode())
    asked = {stage: (fields, images) for stage, fields, images in oracle.asked}
    assert asked["blocked"][1] == list(shots)
    assert asked["supported"][1] == asked["rubric"][1] == asked["reference"][1] == list(shots[1:])
    assert (asked["rubric"][0]["FACT"], asked["rubric"][0]["RUBRIC"]) == ("blue", "Colour of the lamp")
    assert asked["reference"][0] == {
        "TASK": "Find price and colour of the lamp.", "ANSWER": ANSWER_TEXT, "REFERENCE": "12 euros",
    }  # fmt: skip
    assert asked["supported"][0]["PAGES"].splitlines()[1] == "screenshot 2: Shop | http://shop.localhost/lamp"
    assert asked["supported"][0]["ACTIONS"].splitlines()[0] == "1. left_click coordinate=[5, 5]; page unchanged"


async def test_the_first_stage_that_does_not_pass_decides_and_ends_the_questions():
    first_fact = lambda fields, images: fields["FACT"] != "12 euros"  # noqa: E731
    for oracle, answer, outcome, reason, stages in (
        ({"blocked": True}, ANSWER_TEXT, "blocked", "blocked: ", "blocked"),
        ({"blocked": True}, None, "blocked", "blocked: ", "blocked"),
        ({}, None, "failure", "the agent gave no answer", "blocked"),
        ({}, " \n", "failure", "the agent gave no answer", "blocked"),
        ({"supported": False}, ANSWER_TEXT, "failure", "supported: ", "blocked relevance relevance supported"),
        ({"rubric": first_fact}, ANSWER_TEXT, "failure", "fact 1: ", "blocked relevance relevance supported rubric"),
        ({"reference": False}, ANSWER_TEXT, "failure", "reference: ",
         "blocked relevance relevance supported rubric rubric reference"),
    ):  # fmt: skip
        scripted = ScriptedOracle(oracle)
        async with judging(scripted) as (evaluator, _):
            verdict = await evaluator.evaluate(episode(answer))
        assert (verdict.outcome, " ".join(scripted.stages)) == (outcome, stages)
        assert verdict.reason.startswith(reason)


async def test_a_graded_failure_is_paid_its_share_of_facts_and_reference_and_nothing_if_unsupported():
    def known(*true: str) -> Any:
        return lambda fields, images: fields["FACT"] in true

    for oracle, given, outcome, reward, asked in (
        ({}, {}, "success", 1.0, "rubric rubric reference"),
        ({"rubric": known("blue")}, {}, "failure", 2 / 3, "rubric rubric reference"),
        ({"rubric": known("12 euros"), "reference": False}, {}, "failure", 1 / 3, "rubric rubric reference"),
        ({"reference": False}, {}, "failure", 2 / 3, "rubric rubric reference"),
        ({"rubric": known("blue")}, {"reference": None}, "failure", 1 / 2, "rubric rubric"),
        ({"rubric": False}, {"reference": None}, "failure", 0.0, "rubric rubric"),
        ({"supported": False}, {}, "failure", 0.0, ""),
        ({}, {"facts": (), "reference": None}, "success", 1.0, ""),
        ({"blocked": True}, {}, "blocked", 0.0, ""),
        ({}, {"answer": None}, "failure", 0.0, ""),
    ):  # fmt: skip
        scripted, played = ScriptedOracle(oracle), episode(**given)
        async with judging(scripted, {"graded": True}) as (evaluator, _):
            judged = with_verdict(played, await evaluator.evaluate(played))
        assert (judged.outcome, judged.reward) == (outcome, pytest.approx(reward)), (oracle, given)
        assert " ".join(stage for stage in scripted.stages if stage in ("rubric", "reference")) == asked
        stored = decode_trajectory(b"".join(encode_trajectory(judged)), copy=True)
        assert (stored.reward, stored.verdict) == (judged.reward, judged.verdict)


class FaultsFrom:
    """A fault plan: the first `count` requests are answered, all others have the fault."""

    def __init__(self, count: int, fault: str) -> None:
        self.left, self.fault = count, fault

    def draw(self, digest: str) -> str | None:
        self.left -= 1
        return None if self.left >= 0 else self.fault


async def test_a_graded_episode_without_a_usable_reply_is_masked_and_has_no_part_of_a_reward():
    oracle = ScriptedOracle({"rubric": lambda fields, images: fields["FACT"] == "12 euros"})
    played = episode(shots=1)  # blocked, supported, fact 1: yes, fact 2: no, reference: yes
    for answered, fault in itertools.product(range(6), ("truncated", "empty", "contradictory")):
        async with judging(oracle, {"graded": True, "attempts": 2}) as (evaluator, endpoint):
            endpoint.plan = cast(Any, FaultsFrom(answered, fault))
            judged = with_verdict(played, await evaluator.evaluate(played))
        expected = ("failure", pytest.approx(2 / 3), True) if answered == 5 else ("judge_error", 0.0, False)
        assert (judged.outcome, judged.reward, judged.trainable) == expected, (answered, fault)


async def test_what_an_episode_does_not_have_is_not_asked_for():
    async with judging(ScriptedOracle({"reference": False})) as (evaluator, _):
        assert (await evaluator.evaluate(episode(reference=None))).outcome == "success"
        verdict = await evaluator.evaluate(episode(images=(), facts=()))
    assert decisions(verdict) == [("blocked", "", "no"), ("supported", "", "yes"), ("reference", "", "no")]


async def test_a_screenshot_without_a_usable_relevance_is_kept():
    oracle = ScriptedOracle({"relevance": False})
    async with judging(oracle, {"attempts": 1}) as (evaluator, endpoint):
        await evaluator.evaluate(episode())
        assert [images for stage, _, images in oracle.asked if stage == "supported"] == [[episode().images[-1]]]
        endpoint._reader._files[0].stages["relevance"] = "changed"  # the endpoint refuses these requests
        verdict = await evaluator.evaluate(episode())
    assert [len(images) for stage, _, images in oracle.asked if stage == "supported"] == [1, 3]
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


@pytest.mark.parametrize(("structured", "truth"), [("schema", True), ("line", False)])
async def test_webjudge_lists_key_points_scores_screenshots_and_decides_once(structured: str, truth: bool):
    shots = episode().images
    oracle = ScriptedOracle({"outcome": truth, "relevance": lambda fields, images: images != [shots[1]]})
    async with judging(oracle, {"protocol": "webjudge", "structured": structured}) as (evaluator, endpoint):
        verdict = await evaluator.evaluate(episode())
        assert (verdict.outcome, verdict.protocol) == ("success" if truth else "failure", "webjudge")
        assert decisions(verdict) == [
            ("key_points", "", "yes"), ("relevance", "screenshot 1", "yes"), ("relevance", "screenshot 2", "no"),
            ("relevance", "screenshot 3", "yes"), ("outcome", "", "yes" if truth else "no"),
        ]  # fmt: skip
        assert endpoint.requests == 5
        _, fields, images = oracle.asked[-1]
        assert images == [shots[0], shots[2]]
        assert fields["KEY_POINTS"] == "1. Find price and colour of the lamp."
        assert fields["NOTES"] == f"screenshot 1: {REASON}\nscreenshot 3: {REASON}"
        assert fields["ANSWER"] == ANSWER_TEXT
        assert set(fields) == {"TASK", "KEY_POINTS", "ACTIONS", "ANSWER", "NOTES"}
        assert (await evaluator.evaluate(episode(None))).outcome == ("success" if truth else "failure")
        assert "ANSWER" not in oracle.asked[-1][1]


async def test_webjudge_shows_the_last_screenshots_with_evidence_and_keeps_those_without_a_score():
    oracle = ScriptedOracle()
    async with judging(oracle, {"protocol": "webjudge", "max_screenshots": 2, "attempts": 1}) as (evaluator, endpoint):
        await evaluator.evaluate(episode(shots=5))
        assert oracle.asked[-1][2] == list(episode(shots=5).images[-2:])
        (files,) = [files for files in endpoint._reader._files if files.protocol == "webjudge"]
        files.stages["relevance"] = "changed"  # the endpoint refuses these requests
        assert (await evaluator.evaluate(episode())).outcome == "success"
        assert oracle.asked[-1][2] == list(episode().images[-2:])
        assert "NOTES" not in oracle.asked[-1][1]
        files.stages["key_points"] = "changed"
        verdict = await evaluator.evaluate(episode())
    assert (verdict.outcome, verdict.reason) == ("judge_error", "key_points: refused_request")


async def test_a_screenshot_with_a_score_of_three_is_evidence_and_one_with_two_is_not():
    shown: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        kind = body["response_format"]["json_schema"]["name"]
        urls = [part["image_url"]["url"] for part in body["messages"][1]["content"] if part["type"] == "image_url"]
        replies = {"key_points": {"key_points": ["a"]}, "verdict": {"reason": "a", "verdict": "yes"}}
        content = replies.get(kind, {"reason": "a", "score": 3 if data_url(episode().images[0]) in urls else 2})
        shown.extend([len(urls)] if kind == "verdict" else [])
        choice = {"message": {"content": json.dumps(content)}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    async with (
        serving(handle) as url,
        open_evaluator(settings(url, protocol="webjudge"), LocalMeter(BudgetConfig())) as evaluator,
    ):
        verdict = await evaluator.evaluate(episode())
    assert [stage.decision for stage in verdict.stages] == ["yes", "yes", "no", "no", "yes"]
    assert shown == [1]


async def test_webvoyager_asks_one_question_about_the_last_screenshots():
    for truth in (True, False):
        oracle = ScriptedOracle({"outcome": truth})
        async with judging(oracle, {"protocol": "webvoyager", "max_screenshots": 2}) as (evaluator, _):
            verdict = await evaluator.evaluate(episode())
            assert (verdict.outcome, verdict.protocol) == ("success" if truth else "failure", "webvoyager")
            assert (await evaluator.evaluate(episode(None))).outcome == "failure"
        ((stage, fields, images),) = oracle.asked
        assert (stage, set(fields), images) == ("outcome", {"TASK", "ANSWER"}, list(episode().images[1:]))


async def test_agenttrek_asks_one_question_about_reasoning_actions_and_the_last_screenshot():
    made = episode()
    steps = tuple(replace(step, reasoning=f"thought {n}\nof it") for n, step in enumerate(made.steps, 1))
    for truth in (True, False):
        oracle = ScriptedOracle({"outcome": truth})
        async with judging(oracle, {"protocol": "agenttrek"}) as (evaluator, _):
            verdict = await evaluator.evaluate(replace(made, steps=steps))
            assert (verdict.outcome, verdict.protocol) == ("success" if truth else "failure", "agenttrek")
            assert (await evaluator.evaluate(episode(None))).outcome == "failure"
        ((stage, fields, images),) = oracle.asked
        assert (stage, set(fields), images) == ("outcome", {"TASK", "TRAJECTORY"}, [made.images[-1]])
    assert fields["TRAJECTORY"].splitlines() == [
        "Reasoning: thought 1 of it", "1. left_click coordinate=[5, 5]; page unchanged",
        "Reasoning: thought 2 of it", f'2. answer text="{ANSWER_TEXT}"; page unchanged',
    ]  # fmt: skip
    many = replace(made, steps=(*[replace(steps[0], reasoning="why " * 2000)] * 50, made.steps[-1]))
    text = EpisodeView.of(many).trajectory
    assert len(text) <= MAX_FIELD_CHARS
    assert text.count("Reasoning: why why") == 50
    assert text.endswith(f'51. answer text="{ANSWER_TEXT}"; page unchanged')


GROUPED = tuple(starmap(RubricFact, (("a", "The lamp", "12 euros"), ("a", "The lamp", "blue"), ("b", "", "in stock"))))
RELEASED = [  # protocol, requirements as the rubric stage reads them, whether the reference answer is asked about
    ("webgym", [("The lamp", "12 euros"), ("The lamp", "blue"), (None, "in stock")], True),
    ("async_webrl", [(None, "The lamp"), (None, "in stock")], False),
]


@pytest.mark.parametrize(("protocol", "requirements", "reference"), RELEASED)
async def test_released_codes_judge_by_screenshots_and_by_facts_or_groups(
    protocol: str, requirements: list[tuple[str | None, str]], reference: bool
):
    oracle = ScriptedOracle()
    async with judging(oracle, {"protocol": protocol}) as (evaluator, _):
        verdict = await evaluator.evaluate(episode(facts=GROUPED))
    assert (verdict.outcome, verdict.protocol) == ("success", protocol)
    asked = {stage: fields for stage, fields, _ in oracle.asked}
    found = [(fields.get("RUBRIC"), fields["FACT"]) for stage, fields, _ in oracle.asked if stage == "rubric"]
    points = "\n".join(f"{n}. {': '.join(filter(None, each))}" for n, each in enumerate(requirements, 1))
    assert (found, "reference" in asked) == (requirements, reference)
    pointed = {stage for stage, fields in asked.items() if fields.get("KEY_POINTS") == points}
    assert pointed == asked.keys() - {"blocked", "supported"}
    assert [stage for stage, fields in asked.items() if "ANSWER" in fields] == ["supported"]  # no evidence elsewhere


async def test_who_can_be_blocked_is_everyone_or_those_who_answered():
    for protocol, answer, outcome in (
        ("webgym", None, "blocked"), ("webgym", ANSWER_TEXT, "blocked"), ("async_webrl", None, "failure"),
        ("async_webrl", ANSWER_TEXT, "blocked"),
    ):  # fmt: skip
        async with judging(ScriptedOracle({"blocked": True}), {"protocol": protocol}) as (evaluator, _):
            verdict = await evaluator.evaluate(episode(answer))
        assert (verdict.outcome, verdict.calls) == (outcome, int(outcome == "blocked")), (protocol, answer)


UNUSABLE = [  # content of every verdict, finish_reason, outcome as in the released code
    ('{"reason": "it is', "length", "success"), ("the task was done", "stop", "success"),
    ('{"reason": "it is not", "verdict": "no"', "length", "failure"), ("NOT SUCCESS", "stop", "failure"),
    ("", "stop", "failure"), ("I cannot help", "content_filter", "failure"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "finish_reason", "outcome"), UNUSABLE)
async def test_unusable_replies_mask_unless_they_shall_count_as_in_the_released_code(
    content: str, finish_reason: str, outcome: str
):
    shown: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        texts = (await request.json())["messages"][1]["content"]
        shown.append(sum(part["type"] == "image_url" for part in texts))
        choice = {"message": {"content": content}, "finish_reason": finish_reason}
        return web.json_response({"choices": [choice]})

    async with serving(handle) as url:
        for unusable, expected in (("mask", "judge_error"), ("as_released", outcome)):
            chosen = settings(url, protocol="webgym", attempts=1, unusable_replies=unusable)
            async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
                verdict = await evaluator.evaluate(episode(reference=None))
            assert verdict.outcome == expected
    decided = [stage for stage in verdict.stages if stage.name in ("supported", "rubric")]
    assert {stage.decision for stage in decided} == {"yes" if outcome == "success" else "no"}
    assert all(stage.errors for stage in verdict.stages)
    assert f"unusable replies that decided: {len(verdict.stages)}" in verdict.reason
    assert shown[-len(decided) :] == [1] * len(decided)  # without a usable relevance only the last one
