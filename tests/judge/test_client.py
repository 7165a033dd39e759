"""Requests to a real endpoint that fails in every way."""

from __future__ import annotations

import asyncio
import re
import time
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
from megatron_webrl.judge.client import JudgeClient
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.judge.verdict_file import settings_digest
from megatron_webrl.types import Verdict
from tests.judge.support import KEY_VARIABLE, ScriptedOracle, endpoint_of, episode, judging, serving, settings
from tools.judge_endpoint import chat, server
from tools.judge_endpoint.chat import ChatQuestion
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


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "_BACKOFF", lambda state: 0.02)


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


@pytest.mark.parametrize(
    ("fault", "name"),
    [("rate_limited", "rate_limited"), ("server_error", "server_error"), ("dropped", "connection"),
     ("hang", "timeout")],
)  # fmt: skip
async def test_a_fault_of_the_transport_costs_no_attempt(fault: str, name: str):
    verdict, requests = await after(*[fault] * 2, attempts=1, timeout_seconds=1.0)
    (stage,) = verdict.stages
    assert (verdict.outcome, verdict.reason) == ("failure", "the agent gave no answer")
    assert (stage.attempts, stage.errors, requests) == (1, (name,) * 2, 3)


async def test_a_slow_reply_is_waited_for():
    verdict, requests = await after("slow", attempts=1)
    assert (verdict.stages[0].decision, requests) == ("no", 1)


async def test_retry_after_holds_back_all_requests_to_the_endpoint():
    async with judging(ScriptedOracle(), {"concurrency": 8}, retry_after=0.5) as (evaluator, endpoint):
        endpoint.plan = FaultScript("rate_limited")
        started = time.monotonic()
        first = asyncio.create_task(evaluator.evaluate(episode(None)))
        while not endpoint.plan.counts:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the status has arrived
        await asyncio.gather(first, *(evaluator.evaluate(episode(None, ticket=n)) for n in range(1, 9)))
        assert time.monotonic() - started >= 0.5
        assert endpoint.requests == 10


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


async def test_the_deadline_masks_the_episode_and_names_the_fault():
    verdict, requests = await after(*["server_error"] * 999, deadline_seconds=3.0)
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: server_error")
    assert verdict.seconds < 10
    assert requests > 1
    verdict, _ = await after(*["hang"] * 9, deadline_seconds=0.5, timeout_seconds=60)
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: deadline")


async def test_a_retry_after_beyond_the_deadline_is_not_waited_for():
    async with judging(ScriptedOracle(), {"deadline_seconds": 60.0}, retry_after=3600) as (evaluator, endpoint):
        endpoint.plan = FaultScript("rate_limited")
        verdict = await evaluator.evaluate(episode(None))
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: rate_limited")
    assert verdict.seconds < 30


async def test_requests_in_flight_are_limited():
    async with judging(ScriptedOracle(), {"concurrency": 3}, latency=0.05) as (evaluator, endpoint):
        verdicts = await asyncio.gather(*(evaluator.evaluate(episode(ticket=n)) for n in range(4)))
    assert [verdict.outcome for verdict in verdicts] == ["success"] * 4
    assert endpoint.most_in_flight == 3


@pytest.mark.parametrize("structured", ["auto", "schema"])
async def test_an_endpoint_without_schemas_gets_exact_lines_only_with_auto(structured: str):
    async with judging(ScriptedOracle(), {"structured": structured}, schemas=False) as (evaluator, endpoint):
        verdicts = [await evaluator.evaluate(episode(None)) for _ in range(3)]
    if structured == "auto":
        assert {(v.outcome, v.stages[0].attempts, v.stages[0].errors) for v in verdicts} == {("failure", 1, ())}
        assert endpoint.requests == 4  # the refusal is remembered
    else:
        assert {(v.outcome, v.reason) for v in verdicts} == {("judge_error", "blocked: refused_request")}


def fenced(content: str) -> str:
    return f"```json\n{content}\n```"


@pytest.mark.parametrize("known", [False, True])
async def test_an_endpoint_that_ignores_schemas_gets_exact_lines(
    known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def right_reply(question: ChatQuestion, *rest: Any) -> str:
        content = chat.right_reply(question, *rest)
        return fenced(content) if question.mode == "schema" else content

    async with judging(ScriptedOracle(), {"concurrency": 1}) as (evaluator, endpoint):
        if known:  # by a usable reply
            await evaluator.evaluate(episode(None))
        monkeypatch.setattr(server, "right_reply", right_reply)
        verdicts = [await evaluator.evaluate(episode(None, ticket=n)) for n in range(3)]
    if known:
        assert [verdict.outcome for verdict in verdicts] == ["judge_error"] * 3
        return
    assert [verdict.outcome for verdict in verdicts] == ["failure"] * 3
    assert [verdict.stages[0].errors for verdict in verdicts] == [("unparsable", "unparsable"), (), ()]
    assert endpoint.requests == 6
    assert caplog.text.count("ignores response_format in its first 3 replies; replies end with an exact line") == 1


async def test_models_of_one_address_are_known_apart():
    chosen = replace(settings("http://127.0.0.1:1"), blocked=JudgeModelConfig("another"))
    async with JudgeClient(chosen, LocalMeter(chosen.budget)) as client:
        client.note_schema_reply("blocked", "")
        for _ in range(judge_client.SCHEMA_TRIALS - 1):
            client.note_schema_reply("verdict", "unparsable")
        with pytest.raises(judge_client.SchemaRefused):
            client.note_schema_reply("verdict", "unparsable")
        assert (client.mode("verdict"), client.mode("blocked")) == ("line", "schema")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"message": "Unknown parameter: 'response_format'."}, True),
        ({"message": "This model doesn't support response_format, and can't."}, True),
        ({"message": "Invalid value", "param": "response_format.json_schema"}, True),
        ([{"error": {"message": "response_format is not supported"}}], True),
        ({"detail": [{"loc": ["body", "response_format"], "msg": "Extra inputs are not permitted"}]}, True),
        ("response_format: not supported", True),
        ({"message": "The prompt 'they said response_format is refused' is too long"}, False),
        ({"message": 'The prompt "say \\"response_format\\"" is too long'}, False),
        ({"message": "response_format in a message", "param": "messages[1]"}, False),
        ({"detail": [{"loc": ["body"], "msg": "too long", "input": {"response_format": {}}}]}, False),
        (None, False),
    ],
)
def test_only_an_error_about_response_format_ends_the_use_of_schemas(body: object, named: bool):
    assert judge_client.names_response_format(body) is named


async def test_each_slot_has_its_model_at_its_endpoint():
    first, second = ScriptedOracle(), ScriptedOracle()
    async with endpoint_of(first) as (url, _), endpoint_of(second) as (other, _):
        chosen = settings(url, relevance=JudgeModelConfig("small", other), blocked=JudgeModelConfig("middle"))
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            verdict = await evaluator.evaluate(episode())
    assert Counter(second.stages) == {"relevance": 2}
    models = {stage.name: stage.model for stage in verdict.stages}
    assert (models["relevance"], models["blocked"], models["rubric"]) == ("small", "middle", "oracle")
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
    ("text", "low", "high"),
    [("2", 2, 2), ("0.5", 0.5, 0.5), ("-3", 0, 0), ("Wed, 21 Oct 2065 07:28:00 GMT", 300, 300), ("86400", 300, 300),
     ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0)],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(text: str, low: float, high: float):
    assert low <= (judge_client._retry_after({"retry-after": text}) or 0) <= high


@pytest.mark.parametrize("asked", ["0", "Wed, 21 Oct 2015 07:28:00 GMT"])
async def test_a_retry_after_that_is_over_leaves_the_back_off_as_it_is(asked: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge_client, "_BACKOFF", lambda state: 0.5)
    async with (
        answering(503, "", **{"Retry-After": asked}) as url,
        open_evaluator(settings(url, deadline_seconds=3.0), LocalMeter(BudgetConfig())) as evaluator,
    ):
        verdict = await evaluator.evaluate(episode(None))
    assert (verdict.outcome, verdict.reason) == ("judge_error", "blocked: server_error")
    assert 1 < verdict.calls <= 13  # 0.25 s apart at least


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf"])
def test_an_invalid_retry_after_is_ignored(text: str):
    assert judge_client._retry_after({"retry-after": text}) is None


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
    assert {e for v in verdicts for s in v.stages for e in s.errors} >= {"timeout", "truncated", "contradictory"}
    assert set(TRANSPORT) < set(FAULTS)


@pytest.mark.parametrize("limit", [0, 40])
async def test_a_limit_of_the_reason_is_in_the_schema_of_every_request(limit: int, monkeypatch: pytest.MonkeyPatch):
    async with judging(ScriptedOracle(), {"max_reason_chars": limit}) as (evaluator, endpoint):
        bodies: list[Any] = []
        read = endpoint._reader.read
        monkeypatch.setattr(endpoint._reader, "read", lambda body: bodies.append(body) or read(body))
        assert (await evaluator.evaluate(episode())).outcome == "success"
    reasons = [body["response_format"]["json_schema"]["schema"]["properties"]["reason"] for body in bodies]
    assert reasons == [{"type": "string"} | ({"maxLength": limit} if limit else {})] * len(bodies)
    assert len(reasons) == 7


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
            assert (body["max_tokens"], body["temperature"], "reasoning_effort" in body) == (600, 0.7, False)
        else:
            assert (body["max_completion_tokens"], body["top_p"], body["reasoning_effort"]) == (4000, 0.95, "low")
            assert not {"max_tokens", "temperature"} & set(body)
    _, other = await bodies_of({"verdict": plain, "relevance": JudgeModelConfig("small", "")}, monkeypatch)
    pairs = [(a.name, a.digest == b.digest) for a, b in zip(verdict.stages, other.stages, strict=True)]
    assert all(same == (name == "relevance") for name, same in pairs)
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
    chosen = settings("http://x/v1", blocked=JudgeModelConfig(options={"seed": 1}))
    with pytest.raises(ConfigError, match=r"judge\.blocked\.options are of no model; set judge\.blocked\.name"):
        judge_client.JudgeModel.resolve(chosen, "blocked")
