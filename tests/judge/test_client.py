"""Requests to a real endpoint that fails in every way."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.judge import client as judge_client
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.judge.verdict_file import settings_digest
from megatron_webrl.types import Verdict
from tests.judge.support import KEY_VARIABLE, ScriptedOracle, endpoint_of, episode, judging, serving, settings
from tools.judge_endpoint.faults import FAULTS, TRANSPORT, FaultPlan
from tools.judge_endpoint.server import EndpointOptions, serve_endpoint


class FaultScript(FaultPlan):
    """Faults in the order of requests, then none."""

    def __init__(self, *faults: str) -> None:
        super().__init__({})
        self.left = list(faults)

    def draw(self, digest: str) -> str | None:
        fault = self.left.pop(0) if self.left else None
        self.counts.update([fault] if fault else [])
        return fault


async def after(*faults: str, answer: str | None = None, **chosen: Any) -> tuple[Verdict, int]:
    """The verdict on an episode without an answer, which takes one question, and the number of requests."""
    async with judging(ScriptedOracle(), chosen, retry_after=0.1) as (evaluator, endpoint):
        endpoint.plan = FaultScript(*faults)
        verdict = await evaluator.evaluate(episode(answer))
        return verdict, endpoint.requests


@pytest.mark.parametrize("structured", ["schema", "line"])
@pytest.mark.parametrize(
    ("fault", "name"),
    [("truncated", "truncated"), ("invalid_json", "unparsable_response"), ("no_choices", "unparsable_response"),
     ("contradictory", "contradictory"), ("empty", "empty"), ("refusal", "refusal"), ("wrong_schema", None),
     ("broken_reply", "unparsable")],
)  # fmt: skip
async def test_an_unusable_reply_is_asked_again(fault: str, name: str | None, structured: str):
    verdict, requests = await after(fault, fault, structured=structured)
    (stage,) = verdict.stages
    assert verdict.reason == "the agent gave no answer"  # blocked: no
    name = name or {"schema": "wrong_schema", "line": "unparsable"}[structured]
    assert (stage.decision, stage.attempts, stage.errors) == ("no", 3, (name, name))
    assert verdict.calls == requests == 3


@pytest.mark.parametrize("fault", ["truncated", "contradictory", "empty", "refusal", "wrong_schema", "no_choices"])
async def test_an_episode_without_a_usable_reply_is_masked(fault: str):
    verdict, requests = await after(*[fault] * 9, attempts=2)
    (stage,) = verdict.stages
    assert (verdict.outcome, verdict.evaluator, verdict.protocol) == ("judge_error", "judge", "rubric")
    assert (stage.decision, stage.attempts, requests) == ("none", 2, 2)
    assert verdict.reason == f"blocked: {stage.errors[-1]}"


@pytest.mark.parametrize("fault", ["rate_limited", "server_error", "dropped", "hang"])
async def test_a_fault_of_the_transport_costs_no_attempt(fault: str, caplog: pytest.LogCaptureFixture):
    verdict, requests = await after(*[fault] * 2, attempts=1, timeout_seconds=1.0)
    (stage,) = verdict.stages
    assert (verdict.outcome, verdict.reason) == ("failure", "the agent gave no answer")
    assert (stage.attempts, stage.errors, verdict.calls, requests) == (1, (), 3, 3)
    assert caplog.text.count("requests get no reply and are repeated (logged once)") == 1


async def test_a_slow_reply_is_waited_for():
    verdict, requests = await after("slow", attempts=1)
    assert (verdict.stages[0].decision, requests) == ("no", 1)


async def test_a_dead_endpoint_loses_no_episode_when_it_returns():
    oracle = ScriptedOracle()
    async with endpoint_of(oracle) as (url, _):
        port = int(url.split(":")[2].removesuffix("/v1"))
    async with open_evaluator(settings(url, attempts=1), LocalMeter(BudgetConfig())) as evaluator:
        waiting = [asyncio.create_task(evaluator.evaluate(episode(ticket=n))) for n in range(4)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        async with serve_endpoint(EndpointOptions(oracle), port=port):
            assert [(await task).outcome for task in waiting] == ["success"] * 4


async def test_the_deadline_masks_the_episode(caplog: pytest.LogCaptureFixture):
    verdict, requests = await after(*["server_error"] * 999, deadline_seconds=3.0)
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: deadline")
    assert verdict.seconds < 10
    assert requests > 1
    assert caplog.text.count(": status 5") == 1
    verdict, _ = await after(*["hang"] * 9, deadline_seconds=0.5, timeout_seconds=60)
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: deadline")


async def test_a_retry_after_beyond_all_limits_is_not_waited_for():
    async with judging(ScriptedOracle(), {"deadline_seconds": 60.0}, retry_after=3600) as (evaluator, endpoint):
        endpoint.plan = FaultScript("rate_limited")
        verdict = await evaluator.evaluate(episode(None))
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: refused_request")
    assert verdict.seconds < 30


async def test_requests_in_flight_are_limited():
    async with judging(ScriptedOracle(), {"concurrency": 3}, latency=0.05) as (evaluator, endpoint):
        verdicts = await asyncio.gather(*(evaluator.evaluate(episode(ticket=n)) for n in range(4)))
    assert [verdict.outcome for verdict in verdicts] == ["success"] * 4
    assert endpoint.most_in_flight == 3


@pytest.mark.parametrize(("structured", "outcome"), [("schema", "judge_error"), ("line", "failure")])
async def test_an_endpoint_without_schemas_needs_exact_lines(structured: str, outcome: str):
    async with judging(ScriptedOracle(), {"structured": structured}, schemas=False) as (evaluator, _):
        verdict = await evaluator.evaluate(episode(None))
    assert verdict.outcome == outcome
    assert verdict.stages[0].errors == (("refused_request",) if structured == "schema" else ())


async def test_each_slot_has_its_model_at_its_endpoint():
    first, second = ScriptedOracle(), ScriptedOracle()
    async with endpoint_of(first) as (url, _), endpoint_of(second) as (other, _):
        chosen = settings(url, relevance=JudgeModelConfig("small", other))
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            verdict = await evaluator.evaluate(episode())
    assert Counter(second.stages) == {"blocked": 1, "relevance": 2}
    models = {stage.name: stage.model for stage in verdict.stages}
    assert (models["relevance"], models["blocked"], models["rubric"]) == ("small", "small", "oracle")
    assert judge_client.JudgeModel.resolve(chosen, "relevance").output_price == 0.0
    assert judge_client.JudgeModel.resolve(chosen, "verdict").output_price == 2.0


@asynccontextmanager
async def answering(status: int, body: str, kind: str = "application/json", **headers: str) -> AsyncIterator[str]:
    """An endpoint that always answers the same."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type=kind, headers=headers)

    async with serving(handle) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (200, "<html>success</html>", "text/html", "unparsable_response"),
        (200, "", "application/json", "unparsable_response"),
        (200, '{"choices": [{"message": {"content": "VERDICT: no"}}]}', "application/json", "unparsable_response"),
        (200, '{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}', "application/json", "empty"),
        (200, '{"choices": [{"message": {"content": "a", "refusal": "no"}, "finish_reason": "stop"}]}',
         "application/json", "refusal"),
        (200, '{"error": {"message": "out of credits"}}', "application/json", "unparsable_response"),
        (200, '{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1%s, '
         '"completion_tokens": 1}}' % ("0" * 400), "application/json", "empty"),
        (401, '{"error": {"message": "Incorrect API key"}}', "application/json", "refused_request"),
        (404, "no such model", "text/plain", "refused_request"),
        (413, "too large", "text/plain", "refused_request"),
    ],
)  # fmt: skip
async def test_odd_responses_mask_the_episode(status: int, body: str, kind: str, reason: str):
    async with (
        answering(status, body, kind) as url,
        open_evaluator(settings(url), LocalMeter(BudgetConfig())) as evaluator,
    ):
        verdict = await evaluator.evaluate(episode(None))
    assert (verdict.outcome, verdict.reason) == ("judge_error", f"blocked: {reason}")
    assert verdict.calls == (1 if status >= 400 else 3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (JudgeModelConfig("", "http://x/v1"), "judge.verdict.name is empty"),
        (JudgeModelConfig("m", ""), "judge.verdict.url is empty"),
        (JudgeModelConfig("m", "http://x/v1", KEY_VARIABLE), rf"{KEY_VARIABLE} is not set \(judge"),
    ],
)
async def test_an_incomplete_model_is_refused(model: JudgeModelConfig, message: str):
    with pytest.raises(ConfigError, match=message):
        async with open_evaluator(judge_config(evaluators=["judge"], verdict=model), LocalMeter(BudgetConfig())):
            pass


async def test_every_fault_at_once_judges_nothing_wrong():
    rates = {fault: 0.5 / len(FAULTS) for fault in FAULTS}
    oracle = ScriptedOracle({"supported": lambda fields, images: "right" in fields["ANSWER"]})
    chosen = {"timeout_seconds": 2.0, "deadline_seconds": 300.0, "attempts": 4, "concurrency": 8}
    async with judging(oracle, chosen, faults=rates, retry_after=0.05, seed=3) as (evaluator, endpoint):
        verdicts = await asyncio.gather(
            *(evaluator.evaluate(episode(f"{'right' if n % 2 else 'wrong'} {n}", ticket=n)) for n in range(40))
        )
    expected = ["success" if n % 2 else "failure" for n in range(40)]
    wrong = [v for v, e in zip(verdicts, expected, strict=True) if v.outcome not in (e, "judge_error")]
    assert not wrong
    assert sum(v.outcome == "judge_error" for v in verdicts) <= 20
    assert set(endpoint.plan.counts) == set(FAULTS)
    assert {e for v in verdicts for s in v.stages for e in s.errors} >= {"truncated", "contradictory"}
    assert set(TRANSPORT) < set(FAULTS)


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
    assert verdict.outcome == "success"
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
    digests = {settings_digest(settings("http://x/v1", verdict=model)) for model in (plain, own)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({name: 1}, f"judge.verdict.options.{name} is an argument that the judge itself sets")
          for name in ("model", "messages", "response_format", "n", "stream", "stop")],
        ({"max_tokens": None}, "options leaves the limits of a reply {}; one of"),
        ({"max_completion_tokens": 9}, "leaves the limits of a reply {'max_tokens': 1, 'max_completion_tokens': 9}"),
        ({"max_tokens": 0}, "must be a number of at least 1"),
        ({"max_tokens": "many"}, "must be a number of at least 1"),
        ({"seed": float("nan")}, "options cannot be sent as JSON"),
    ],
)  # fmt: skip
def test_options_that_the_judge_cannot_work_with_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_sections(settings("http://x/v1", verdict=JudgeModelConfig("m", "http://x/v1", options=options)), "judge.")


def test_options_of_a_slot_without_a_model_are_refused():
    chosen = settings("http://x/v1", relevance=JudgeModelConfig(options={"seed": 1}))
    with pytest.raises(ConfigError, match=r"judge\.relevance\.options are of no model; set judge\.relevance\.name"):
        judge_client.JudgeModel.resolve(chosen, "relevance")
