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


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")


@pytest.mark.parametrize("right", [True, False])
async def test_a_key_reaches_the_endpoint_and_no_log_verdict_file_or_exception(
    right: bool, caplog: pytest.LogCaptureFixture
):
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
    """A reply of the right form that quotes the key."""
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
async def test_a_key_that_an_endpoint_repeats_is_in_no_verdict_record_or_log(
    respond: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
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
    """Raises an exception instead of counting."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def reserve(self, estimate: Usage) -> int:
        raise self.error


async def test_an_unexpected_exception_masks_the_episode_without_the_key_and_an_end_of_the_job_passes(
    caplog: pytest.LogCaptureFixture,
):
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
