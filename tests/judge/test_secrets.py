"""Keys stay in the environment."""

from __future__ import annotations

import logging
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.client import Spending
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.judge.judge import Judge
from tests.judge.support import KEY_VARIABLE, ScriptedOracle, endpoint_of, episode, settings

KEY = "sk-secret-5b1f7c0a9d"


@pytest.mark.parametrize("right", [True, False])
async def test_a_key_reaches_the_endpoint_and_no_log_verdict_or_file(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    for name in ("", "openai", "httpx", "httpx2", "httpcore", "httpcore2"):
        caplog.set_level(logging.DEBUG, name)
    faults = {"rate_limited": 0.1, "server_error": 0.1, "dropped": 0.1, "truncated": 0.1, "invalid_json": 0.1}
    required = KEY if right else "another"
    async with endpoint_of(ScriptedOracle(), key=required, faults=faults, retry_after=0.01) as (url, endpoint):
        chosen = settings(url, cache=str(tmp_path), verdict=JudgeModelConfig("oracle", url, KEY_VARIABLE), attempts=9)
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            verdicts = [await evaluator.evaluate(episode(ticket=n, instruction=f"Task {n}")) for n in range(4)]
        assert {v.outcome for v in verdicts} == ({"success"} if right else {"judge_error"})
        assert endpoint.requests > 3
    texts = [repr(verdict) + str(asdict(verdict)) for verdict in verdicts]
    texts += [path.read_text() for path in tmp_path.rglob("*.json")]
    texts += [caplog.text, str(asdict(chosen)), *(str(record.__dict__) for record in caplog.records)]
    assert not [text for text in texts if KEY in text]
    if not right:
        assert "Incorrect API key provided: ***" in caplog.text  # the endpoint repeats the key


async def test_an_exception_of_a_request_does_not_hold_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    async with endpoint_of(ScriptedOracle(), key="another") as (url, _):
        chosen = settings(url, verdict=JudgeModelConfig("oracle", url, KEY_VARIABLE))
        async with Judge(chosen, LocalMeter(BudgetConfig())) as judge:
            with pytest.raises(Exception, match="refused_request") as error:
                await judge._client.complete("verdict", {"messages": [], "max_tokens": 1}, 0, 1e12, Spending(), [])
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    assert KEY not in str(error.value)
    assert KEY.encode() not in pickle.dumps(error.value.args)
