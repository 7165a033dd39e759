"""Keys stay in the environment."""

from __future__ import annotations

import json
import logging
import pickle
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from aiohttp import web

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.judge.budget import BudgetSpent, LocalMeter, Usage
from megatron_webrl.judge.client import JudgeClient, Spending
from megatron_webrl.judge.evaluation import Judge, open_evaluator
from megatron_webrl.ring.record import encode_trajectory
from tests.judge.support import KEY_VARIABLE, ScriptedOracle, endpoint_of, episode, serving, settings

KEY = "sk-secret-5b1f/7c0a9d+4e"


@pytest.mark.parametrize("right", [True, False])
async def test_a_key_reaches_the_endpoint_and_no_log_verdict_or_file(
    right: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
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
    texts = [repr(verdict) + str(asdict(verdict)) for verdict in verdicts]
    texts += [caplog.text, str(asdict(chosen)), *(str(record.__dict__) for record in caplog.records)]
    assert not [text for text in texts if KEY in text]
    if not right:
        assert "Incorrect API key provided: ***" in caplog.text  # the endpoint repeats the key


async def test_an_exception_of_a_request_does_not_hold_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    async with endpoint_of(ScriptedOracle(), key="another") as (url, _):
        chosen = settings(url, verdict=JudgeModelConfig("oracle", url, KEY_VARIABLE))
        async with JudgeClient(chosen, LocalMeter(BudgetConfig())) as client:
            with pytest.raises(Exception, match="refused_request") as error:
                await client.complete("verdict", {"messages": [], "max_tokens": 1}, 0, 1e12, Spending())
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    assert KEY not in str(error.value)
    assert KEY.encode() not in pickle.dumps(error.value.args)


def quoting_reply(key: str) -> web.Response:
    """A reply of the right form that quotes the key."""
    choice = {
        "message": {"content": json.dumps({"reason": f"the key {key}", "verdict": "no"})},
        "finish_reason": "stop",
    }
    return web.json_response({"choices": [choice]})


@pytest.mark.parametrize(
    "respond",
    [
        lambda key: web.json_response({"error": {"message": "x" * 250 + f" wrong key {key}"}}, status=401),
        lambda key: web.Response(text=f"{'x ' * 145}{key} is wrong".replace("/", "\\/"), status=403),
        lambda key: web.json_response({"error": {"message": f"wrong key {key}"}}),
        lambda key: web.Response(text="x" * 990 + key),
        quoting_reply,
    ],
    ids=["cut error", "escaped error", "error with status 200", "cut error with status 200", "reply"],
)  # fmt: skip
async def test_a_key_that_an_endpoint_repeats_is_in_no_verdict_record_or_log(
    respond: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")

    async def handle(request: web.Request) -> web.Response:
        return respond(request.headers["Authorization"].removeprefix("Bearer "))

    async with serving(handle) as url:
        chosen = settings(url, verdict=JudgeModelConfig("oracle", url, KEY_VARIABLE))
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            judged = replace(episode(), verdict=await evaluator.evaluate(episode()))
    texts = [repr(judged.verdict), b"".join(encode_trajectory(judged)).decode(errors="replace"), caplog.text]
    assert "***" in texts[0]
    assert not [text for text in texts if KEY[:9] in text]


@pytest.mark.parametrize("key", ["sk-\u00e9-secret-key", "sk-secret\x01-key", "sk-secret\nkey"])
async def test_a_key_that_no_header_can_hold_is_refused_without_repeating_it(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, key)
    chosen = settings("http://x/v1", verdict=JudgeModelConfig("m", "http://x/v1", KEY_VARIABLE))
    with pytest.raises(ConfigError, match="characters that no header can hold") as error:
        Judge(chosen, LocalMeter(BudgetConfig()))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "variable", "message"),
    [
        ("http://x/v1", "sk-proj-secret", "judge.verdict.key_variable is not the name of an environment variable"),
        ("http://x/v1", "AIzasecret", "an environment variable that is not set (judge.*.key_variable)"),
        ("http://user:secret@x/v1", "", "judge.verdict.url must hold no user, password, query or fragment"),
        ("user:secret@x/v1", "", "judge.verdict.url must hold no user, password, query or fragment"),
        ("http://x/v1?key=secret", "", "judge.verdict.url must hold no user, password, query or fragment"),
        ("http://x/v1#secret", "", "judge.verdict.url must hold no user, password, query or fragment"),
    ],
)
def test_a_secret_in_a_setting_is_refused_without_repeating_it(url: str, variable: str, message: str):
    model = JudgeModelConfig("m", url, variable)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        Judge(settings("http://x/v1", verdict=model), LocalMeter(BudgetConfig()))
    assert "secret" not in str(error.value)
    if "not set" not in message:
        with pytest.raises(ConfigError, match=re.escape(message)):  # by every command, with any evaluator
            check_sections(judge_config(verdict=model), "judge.")


class RaisingMeter:
    """Raises an exception instead of counting."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def reserve(self, estimate: Usage) -> int:
        raise self.error

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None: ...


async def test_an_unexpected_exception_masks_the_episode_and_is_logged_without_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    chosen = settings("http://x/v1", verdict=JudgeModelConfig("m", "http://x/v1", KEY_VARIABLE))
    judge = Judge(chosen, RaisingMeter(KeyError(f"odd {KEY}")))
    async with judge.client:
        verdict, _ = await judge.judge(episode(ticket=5))
    assert (verdict.outcome, verdict.reason) == ("judge_error", "KeyError in the judge")
    assert "the judge failed on ticket 5, index 0:" in caplog.text
    assert "Traceback" in caplog.text
    assert "KeyError: 'odd ***'" in caplog.text
    assert KEY not in caplog.text


@pytest.mark.parametrize("kind", [BudgetSpent, JobEnded, JobFailed])
async def test_a_spent_budget_and_the_end_of_the_job_pass_through_the_judge(kind: type[Exception]):
    judge = Judge(settings("http://x/v1"), RaisingMeter(kind("over")))
    async with judge.client:
        with pytest.raises(kind, match="over"):
            await judge.judge(episode())
