"""Requests to a real endpoint that fails in every way."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.client import JudgeModel
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.judge.verdict_file import settings_digest
from megatron_webrl.types import Verdict
from tests.judge.support import KEY_VARIABLE, ScriptedOracle, endpoint_of, episode, judging, serving, settings
from tools.judge_endpoint.faults import FaultPlan
from tools.judge_endpoint.server import EndpointOptions, serve_endpoint


class FaultScript(FaultPlan):
    """Faults in the order of requests, then none."""

    def __init__(self, *faults: str) -> None:
        super().__init__({})
        self.left = list(faults)

    def draw(self, digest: str) -> str | None:
        return self.left.pop(0) if self.left else None


async def after(*faults: str, schemas: bool = True, **chosen: Any) -> tuple[Verdict, int]:
    """The verdict on an episode without an answer, which takes one question, and the number of requests."""
    options = {"retry_after": chosen.pop("retry_after", 0.1), "schemas": schemas}
    async with judging(ScriptedOracle(), chosen, **options) as (evaluator, endpoint):
        endpoint.plan = FaultScript(*faults)
        verdict = await evaluator.evaluate(episode(None))
        return verdict, endpoint.requests


@pytest.mark.parametrize("structured", ["schema", "line"])
async def test_an_unusable_reply_is_asked_again_and_masks_the_episode_after_the_last_attempt(structured: str):
    for fault, name in (
        ("truncated", "truncated"), ("invalid_json", "unparsable_response"), ("no_choices", "unparsable_response"),
        ("contradictory", "contradictory"), ("empty", "empty"), ("refusal", "refusal"), ("broken_reply", "unparsable"),
        ("wrong_schema", "wrong_schema" if structured == "schema" else "unparsable"),
    ):  # fmt: skip
        verdict, requests = await after(fault, fault, structured=structured)
        (stage,) = verdict.stages
        assert verdict.reason == "the agent gave no answer"  # blocked: no
        assert (stage.decision, stage.attempts, stage.errors) == ("no", 3, (name, name))
        assert verdict.calls == requests == 3
        verdict, requests = await after(*[fault] * 2, structured=structured, attempts=2)
        (stage,) = verdict.stages
        assert (verdict.outcome, verdict.evaluator, verdict.protocol) == ("judge_error", "judge", "rubric")
        assert (stage.decision, stage.attempts, requests) == ("none", 2, 2)
        assert verdict.reason == f"blocked: {name}"


@pytest.mark.parametrize("fault", ["rate_limited", "server_error", "dropped", "hang"])
async def test_a_fault_of_the_transport_costs_no_attempt(fault: str, caplog: pytest.LogCaptureFixture):
    verdict, requests = await after(*[fault] * 2, "slow", attempts=1, timeout_seconds=0.8)
    (stage,) = verdict.stages
    assert (verdict.outcome, verdict.reason) == ("failure", "the agent gave no answer")
    assert (stage.attempts, stage.errors, verdict.calls, requests) == (1, (), 3, 3)
    assert caplog.text.count("requests get no reply and are repeated (logged once)") == 1


async def test_a_dead_endpoint_loses_no_episode_when_it_returns():
    oracle = ScriptedOracle()
    async with endpoint_of(oracle) as (url, _):
        port = int(url.split(":")[2].removesuffix("/v1"))
    async with open_evaluator(settings(url, attempts=1), LocalMeter(BudgetConfig())) as evaluator:
        waiting = [asyncio.create_task(evaluator.evaluate(episode(ticket=n))) for n in range(4)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        async with serve_endpoint(EndpointOptions(oracle), port=port):
            assert [(await task).outcome for task in waiting] == ["success"] * 4


async def test_the_deadline_masks_the_episode(caplog: pytest.LogCaptureFixture):
    verdict, requests = await after(*["server_error"] * 999, deadline_seconds=0.7)
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: deadline")
    assert verdict.seconds < 10
    assert requests > 1
    assert caplog.text.count(": status 5") == 1
    verdict, _ = await after(*["hang"] * 9, deadline_seconds=0.3, timeout_seconds=60)
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: deadline")
    verdict, _ = await after("rate_limited", deadline_seconds=60.0, retry_after=3600)  # beyond all limits
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: refused_request")
    assert verdict.seconds < 30


async def test_requests_in_flight_are_limited():
    async with judging(ScriptedOracle(), {"concurrency": 3}, latency=0.05) as (evaluator, endpoint):
        verdicts = await asyncio.gather(*(evaluator.evaluate(episode(ticket=n)) for n in range(4)))
    assert [verdict.outcome for verdict in verdicts] == ["success"] * 4
    assert endpoint.most_in_flight == 3


async def test_an_endpoint_without_schemas_needs_exact_lines():
    for structured, outcome, errors in (("schema", "judge_error", ("refused_request",)), ("line", "failure", ())):
        verdict, _ = await after(schemas=False, structured=structured)
        assert (verdict.outcome, verdict.stages[0].errors) == (outcome, errors)


async def test_each_slot_has_its_model_at_its_endpoint():
    second = ScriptedOracle()
    async with endpoint_of(ScriptedOracle()) as (url, _), endpoint_of(second) as (other, _):
        chosen = settings(url, relevance=JudgeModelConfig("small", other))
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            verdict = await evaluator.evaluate(episode())
    assert Counter(second.stages) == {"blocked": 1, "relevance": 2}
    models = {stage.name: stage.model for stage in verdict.stages}
    assert (models["relevance"], models["blocked"], models["rubric"]) == ("small", "small", "oracle")
    assert [JudgeModel.resolve(chosen, slot).output_price for slot in ("relevance", "verdict")] == [0.0, 2.0]


async def test_odd_responses_mask_the_episode():
    for status, body, reason in (
        (200, "<html>success</html>", "unparsable_response"),
        (200, '{"choices": [{"message": {"content": "VERDICT: no"}}]}', "unparsable_response"),
        (200, '{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}', "empty"),
        (200, '{"choices": [{"message": {"content": "a", "refusal": "no"}, "finish_reason": "stop"}]}', "refusal"),
        (200, '{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1%s, '
         '"completion_tokens": 1}}' % ("0" * 400), "empty"),
        (401, '{"error": {"message": "Incorrect API key"}}', "refused_request"),
        (413, "too large", "refused_request"),
    ):  # fmt: skip

        async def handle(request: web.Request, status: int = status, body: str = body) -> web.Response:
            return web.Response(status=status, text=body, content_type="application/json")

        async with (
            serving(handle) as url,
            open_evaluator(settings(url), LocalMeter(BudgetConfig())) as evaluator,
        ):
            verdict = await evaluator.evaluate(episode(None))
        assert (verdict.outcome, verdict.reason) == ("judge_error", f"blocked: {reason}")
        assert verdict.calls == (1 if status >= 400 else 3)


async def bodies_of(chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Verdict]:
    """Requests of one verdict, as the endpoint received them."""
    bodies: list[Any] = []
    async with endpoint_of(ScriptedOracle()) as (url, endpoint):
        read = endpoint._reader.read
        monkeypatch.setattr(endpoint._reader, "read", lambda body: bodies.append(body) or read(body))
        slots = {slot: replace(model, url=url) for slot, model in chosen.items()}
        async with open_evaluator(settings(url, **slots), LocalMeter(BudgetConfig(tokens_per_hour=10**6))) as evaluator:
            return bodies, await evaluator.evaluate(episode())


async def test_options_of_a_model_replace_add_and_leave_out_arguments_and_change_the_digest(
    monkeypatch: pytest.MonkeyPatch,
):
    options = {"max_tokens": None, "max_completion_tokens": 4000, "temperature": None, "reasoning_effort": "low"}
    plain, own = JudgeModelConfig("m", ""), JudgeModelConfig("m", "", options=options)
    bodies, verdict = await bodies_of({"verdict": own, "relevance": JudgeModelConfig("small", "")}, monkeypatch)
    for body in bodies:
        if body["model"] == "small":  # options follow the name
            assert body["max_tokens"] in (500, 600)
            assert (body["temperature"], "reasoning_effort" in body) == (0.7, False)
        else:
            assert (body["max_completion_tokens"], body["top_p"], body["reasoning_effort"]) == (4000, 0.95, "low")
            assert not {"max_tokens", "temperature"} & set(body)
    _, other = await bodies_of({"verdict": plain, "relevance": JudgeModelConfig("small", "")}, monkeypatch)
    pairs = [(a.name, a.digest == b.digest) for a, b in zip(verdict.stages, other.stages, strict=True)]
    assert all(same == (name in ("blocked", "relevance")) for name, same in pairs)
    assert len({settings_digest(settings("http://x/v1", verdict=model)) for model in (plain, own)}) == 2


async def test_a_model_or_options_that_the_judge_cannot_work_with_are_refused():
    for model, words in (
        (JudgeModelConfig("", "http://x/v1"), "judge.verdict.name"), (JudgeModelConfig("m", ""), "judge.verdict.url"),
        (JudgeModelConfig("m", "http://x/v1", KEY_VARIABLE), f"{KEY_VARIABLE} is not set"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            async with open_evaluator(judge_config(evaluators=["judge"], verdict=model), LocalMeter(BudgetConfig())):
                pass
    for options, words in (
        *(({name: 1}, f"judge.verdict.options.{name}") for name in ("model", "messages", "response_format", "stop")),
        ({"max_tokens": None}, "options leaves the limits of a reply {}"),
        ({"max_completion_tokens": 9}, "leaves the limits of a reply {'max_tokens': 1, 'max_completion_tokens': 9}"),
        ({"max_tokens": 0}, "at least 1"), ({"max_tokens": "many"}, "at least 1"),
        ({"seed": float("nan")}, "options cannot be sent as JSON"),
    ):  # fmt: skip
        model = JudgeModelConfig("m", "http://x/v1", options=options)
        with pytest.raises(ConfigError, match=re.escape(words)):
            check_sections(settings("http://x/v1", verdict=model), "judge.")
    chosen = settings("http://x/v1", relevance=JudgeModelConfig(options={"seed": 1}))
    with pytest.raises(ConfigError, match=r"judge\.relevance\.options .* set judge\.relevance\.name"):
        JudgeModel.resolve(chosen, "relevance")
