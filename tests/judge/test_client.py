"""Requests to a real endpoint that fails in every way, and keys, which stay in the environment."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import re
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
from aiohttp import web

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.judge.budget import BudgetSpent, LocalMeter, Usage
from megatron_webrl.judge.client import JudgeClient, JudgeModel, RequestFailed, Spending
from megatron_webrl.judge.evaluation import Judge, open_evaluator
from megatron_webrl.judge.verdict_file import settings_digest
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.types import Verdict
from tests.judge.support import KEY_VARIABLE, ScriptedOracle, endpoint_of, episode, judging, serving, settings
from tools.judge_endpoint.faults import FaultPlan
from tools.judge_endpoint.server import EndpointOptions, serve_endpoint


class FaultScript(FaultPlan):
    def __init__(self, *faults: str) -> None:
        super().__init__({})
        self.left = list(faults)

    def draw(self, digest: str) -> str | None:
        return self.left.pop(0) if self.left else None


async def after(*faults: str, **chosen: Any) -> tuple[Verdict, int]:
    """The verdict on an episode without an answer, which takes one question, and the number of requests."""
    retry_after = chosen.pop("retry_after", 0.1)
    async with judging(ScriptedOracle(), chosen, retry_after=retry_after) as (evaluator, endpoint):
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


async def test_a_dead_endpoint_loses_no_episode_when_it_returns_and_requests_in_flight_are_limited():
    oracle = ScriptedOracle()
    async with endpoint_of(oracle) as (url, _):
        port = int(url.split(":")[2].removesuffix("/v1"))
    async with open_evaluator(settings(url, attempts=1, concurrency=3), LocalMeter(BudgetConfig())) as evaluator:
        waiting = [asyncio.create_task(evaluator.evaluate(episode(ticket=n))) for n in range(4)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        async with serve_endpoint(EndpointOptions(oracle, latency=0.05), port=port) as (_, endpoint):
            assert [(await task).outcome for task in waiting] == ["success"] * 4
            assert endpoint.most_in_flight == 3


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


async def test_a_request_that_waits_for_others_ends_at_its_own_deadline():
    async def never(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(60)
        return web.Response()

    asked, body, now = asyncio.Event(), {"messages": [], "max_tokens": 1}, asyncio.get_running_loop().time()
    async with (
        serving(never) as url,
        JudgeClient(settings(url, concurrency=1), LocalMeter(BudgetConfig())) as client,
    ):
        first = asyncio.create_task(client.complete("verdict", body, 0, now + 60, Spending()))
        await asked.wait()
        with pytest.raises(RequestFailed, match="deadline"):
            await asyncio.wait_for(client.complete("verdict", body, 0, now + 0.2, Spending()), 5)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


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
        (200, '{"choices": [{"message": {"content": "VERDICT: no"}}]}', "unparsable_response"),
        (200, '{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}', "empty"),
        (200, '{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1%s, '
         '"completion_tokens": 1}}' % ("0" * 400), "empty"),
        (200, '{"choices": [{"message": {"content": ""}, "finish_reason": "stop"}], "usage": {"prompt_tokens": -9999, '
         '"completion_tokens": 1}}', "empty"),
        (413, "too large", "refused_request"),
    ):  # fmt: skip

        async def handle(request: web.Request, status: int = status, body: str = body) -> web.Response:
            return web.Response(status=status, text=body, content_type="application/json")

        meter = LocalMeter(BudgetConfig())
        async with serving(handle) as url, open_evaluator(settings(url), meter) as evaluator:
            verdict = await evaluator.evaluate(episode(None))
        assert (verdict.outcome, verdict.reason) == ("judge_error", f"blocked: {reason}")
        assert verdict.calls == meter.used.calls == (1 if status >= 400 else 3)
        assert (meter.used.tokens > 0) == (status < 400)  # estimates, but for what was refused


async def bodies_of(chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Verdict]:
    """Requests of one verdict, as the endpoint received them."""
    bodies: list[Any] = []
    async with endpoint_of(ScriptedOracle()) as (url, endpoint):
        read = endpoint._reader.read
        monkeypatch.setattr(endpoint._reader, "read", lambda body: bodies.append(body) or read(body))
        slots = {slot: replace(model, url=url) for slot, model in chosen.items()}
        async with open_evaluator(settings(url, **slots), LocalMeter(BudgetConfig(tokens_per_hour=10**6))) as evaluator:
            return bodies, await evaluator.evaluate(episode())


async def test_options_of_a_model_replace_and_remove_arguments_and_change_the_digest(monkeypatch: pytest.MonkeyPatch):
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


async def test_a_model_or_options_that_the_judge_cannot_work_with_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KEY_VARIABLE)
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


KEY = "sk-secret-5b1f/7c0a9d+4e"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")


@pytest.mark.parametrize("right", [True, False])
async def test_a_key_reaches_the_endpoint_and_no_log_file_or_exception(right: bool, caplog: pytest.LogCaptureFixture):
    for name in ("", "openai", "httpx", "httpx2", "httpcore", "httpcore2"):
        caplog.set_level(logging.DEBUG, name)
    faults = {"rate_limited": 0.1, "server_error": 0.1, "dropped": 0.1, "truncated": 0.1, "invalid_json": 0.1}
    required = KEY if right else "another"
    async with endpoint_of(ScriptedOracle(), key=required, faults=faults, retry_after=0.01) as (url, endpoint):
        chosen = settings(url, verdict=JudgeModelConfig("oracle", url, KEY_VARIABLE), attempts=9)
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            verdicts = [await evaluator.evaluate(episode(ticket=n, instruction=f"Task {n}")) for n in range(4)]
        assert {v.outcome for v in verdicts} == ({"success"} if right else {"judge_error"})
        assert endpoint.requests > 3
        if not right:
            async with JudgeClient(chosen, LocalMeter(BudgetConfig())) as client:
                with pytest.raises(Exception, match="refused_request") as error:
                    await client.complete("verdict", {"messages": [], "max_tokens": 1}, 0, 1e12, Spending())
            assert (error.value.__cause__, error.value.__suppress_context__) == (None, True)
            assert KEY.encode() not in pickle.dumps((str(error.value), error.value.args))
            assert "Incorrect API key provided: ***" in caplog.text  # the endpoint repeats the key
    texts = [repr(verdict) + str(asdict(verdict)) for verdict in verdicts]
    texts += [caplog.text, str(asdict(chosen)), *(str(record.__dict__) for record in caplog.records)]
    assert not [text for text in texts if KEY in text]


def quoting_reply(key: str) -> web.Response:
    content = json.dumps({"reason": f"the key {key}", "verdict": "no"})
    return web.json_response({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})


@pytest.mark.parametrize(
    "respond",
    [
        lambda key: web.json_response({"error": {"message": "x" * 250 + f" wrong key {key}"}}, status=401),
        lambda key: web.Response(text=f"{'x ' * 145}{key} is wrong".replace("/", "\\/"), status=403),
        lambda key: web.Response(text="x" * 990 + key),
        quoting_reply,
    ],
    ids=["cut error", "escaped error", "cut error with status 200", "reply"],
)
async def test_no_repeated_key_is_kept(respond: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KEY_VARIABLE)
    monkeypatch.setenv("WEBRL_TEST_ACCOUNT", KEY)  # a name that does not say that it is secret

    async def handle(request: web.Request) -> web.Response:
        return respond(request.headers["Authorization"].removeprefix("Bearer "))

    async with serving(handle) as url:
        chosen = settings(url, verdict=JudgeModelConfig("oracle", url, "WEBRL_TEST_ACCOUNT"))
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            judged = replace(episode(), verdict=await evaluator.evaluate(episode()))
    texts = [repr(judged.verdict), b"".join(encode_trajectory(judged)).decode(errors="replace"), caplog.text]
    assert "***" in texts[0]
    assert not [text for text in texts if KEY[:9] in text]


def test_a_key_that_no_header_can_hold_is_refused_without_repeating_it(monkeypatch: pytest.MonkeyPatch):
    chosen = settings("http://x/v1", verdict=JudgeModelConfig("m", "http://x/v1", KEY_VARIABLE))
    for key in ("sk-\u00e9-secret-key", "sk-secret\x01-key"):
        monkeypatch.setenv(KEY_VARIABLE, key)
        with pytest.raises(ConfigError, match="key_variable") as error:
            Judge(chosen, LocalMeter(BudgetConfig()))
        assert "secret" not in str(error.value)


def test_a_secret_in_a_setting_is_refused_without_repeating_it():
    for url, variable, words in (
        ("http://x/v1", "sk-proj-secret", "judge.verdict.key_variable is not the name of an environment variable"),
        ("http://x/v1", "AIzasecret", "an environment variable that is not set (judge.*.key_variable)"),
        ("http://user:secret@x/v1", "", "judge.verdict.url must hold no"),
        ("user:secret@x/v1", "", "judge.verdict.url must hold no"),
        ("http://x/v1?key=secret", "", "judge.verdict.url must hold no"),
        ("http://x/v1#secret", "", "judge.verdict.url must hold no"),
    ):
        model = JudgeModelConfig("m", url, variable)
        with pytest.raises(ConfigError, match=re.escape(words)) as error:
            Judge(settings("http://x/v1", verdict=model), LocalMeter(BudgetConfig()))
        assert "secret" not in str(error.value)
        if "not set" not in words:
            with pytest.raises(ConfigError, match=re.escape(words)):  # by every command, with any evaluator
                check_sections(judge_config(verdict=model), "judge.")


class RaisingMeter:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def reserve(self, estimate: Usage) -> int:
        raise self.error


async def test_an_unexpected_exception_masks_the_episode_and_an_end_of_the_job_passes(caplog: pytest.LogCaptureFixture):
    chosen = settings("http://x/v1", verdict=JudgeModelConfig("m", "http://x/v1", KEY_VARIABLE))
    judge = Judge(chosen, RaisingMeter(KeyError(f"odd {KEY}")))  # type: ignore[arg-type]
    async with judge.client:
        verdict, decides = await judge.judge(episode(ticket=5))
        assert (verdict.outcome, verdict.reason, decides) == ("judge_error", "KeyError in the judge", False)
        for words in ("the judge failed on ticket 5, index 0:", "Traceback", "KeyError: 'odd ***'"):
            assert words in caplog.text
        assert KEY not in caplog.text
        for kind in (BudgetSpent, JobEnded, JobFailed):
            judge.client._meter = RaisingMeter(kind("over"))  # type: ignore[assignment]
            with pytest.raises(kind, match="over"):
                await judge.judge(episode())


def test_a_key_is_of_its_endpoint_only():
    known = JudgeModelConfig("m", "http://x/v1", KEY_VARIABLE)
    for other, variable in ((JudgeModelConfig("small"), KEY_VARIABLE), (JudgeModelConfig("small", "http://y/v1"), "")):
        chosen = settings("http://x/v1", verdict=known, relevance=other)
        assert JudgeModel.resolve(chosen, "relevance").key_variable == variable
