"""The budget of an hour."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.budget import HOUR_SECONDS, BudgetSpent, LocalMeter, Usage
from megatron_webrl.judge.evaluation import open_evaluator
from tests.judge.support import ScriptedOracle, episode, judging

USAGE = st.builds(Usage, st.integers(0, 3), st.integers(0, 500), st.floats(0, 2))


@pytest.mark.parametrize(
    ("limits", "name"),
    [({"calls_per_hour": 2}, "calls"), ({"tokens_per_hour": 100}, "tokens"), ({"dollars_per_hour": 0.5}, "dollars")],
)
async def test_a_reservation_beyond_a_limit_is_refused_and_counts_nothing(limits: dict[str, Any], name: str):
    meter = LocalMeter(BudgetConfig(**limits))
    await meter.reserve(Usage(1, 50, 0.25))
    await meter.reserve(Usage(1, 50, 0.25))
    with pytest.raises(BudgetSpent, match=rf"{name} this hour, the limit is .* \(judge.budget.{name}_per_hour\)"):
        await meter.reserve(Usage(1, 50, 0.25))
    assert meter.used == Usage(2, 100, 0.5)


async def test_the_budget_starts_afresh_with_each_hour():
    now = [3599.0]
    meter = LocalMeter(BudgetConfig(calls_per_hour=1), lambda: now[0])
    hour = await meter.reserve(Usage(1, 10))
    now[0] = 3600.0
    await meter.reserve(Usage(1, 20))
    await meter.settle(hour, Usage(1, 10), Usage(1, 500))  # of the last hour
    assert meter.used == Usage(1, 20)


async def test_processes_one_after_another_share_the_budget_through_a_file(tmp_path: Path):
    now, file, budget = [7200.0], tmp_path / "usage.json", BudgetConfig(calls_per_hour=3)
    for _ in range(2):
        meter = LocalMeter(budget, lambda: now[0], file)
        await meter.settle(await meter.reserve(Usage(1, 9, 0.5)), Usage(1, 9, 0.5), Usage(1, 5, 0.25))
    third = LocalMeter(budget, lambda: now[0], file)
    assert third.used == Usage(2, 10, 0.5)
    await third.reserve(Usage(1, 9))  # a process that is killed here has counted its request
    with pytest.raises(BudgetSpent, match="4 calls this hour, the limit is 3"):
        await LocalMeter(budget, lambda: now[0], file).reserve(Usage(1, 9))
    now[0] += 3600.0
    await LocalMeter(budget, lambda: now[0], file).reserve(Usage(3, 9))
    file.write_text("{")
    await LocalMeter(budget, lambda: now[0], file).reserve(Usage(3, 9))


async def test_without_limits_no_file_is_written(tmp_path: Path):
    await LocalMeter(BudgetConfig(), file=tmp_path / "usage.json").reserve(Usage(1, 9))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("protocol", "slots", "missing"),
    [
        ("rubric", {"verdict": 0.0}, "verdict"),
        ("rubric", {"verdict": 1.0, "relevance": 0.0}, "relevance"),
        ("webjudge", {"verdict": 1.0, "relevance": 0.0}, "relevance"),
        ("webjudge", {"verdict": 1.0, "relevance": 1.0}, None),
        ("webvoyager", {"verdict": 1.0}, None),
        ("rubric", {"verdict": 1.0}, None),
    ],
)
async def test_a_limit_in_dollars_needs_the_prices_of_all_models_in_use(
    protocol: str, slots: dict[str, float], missing: str | None
):
    models = {slot: JudgeModelConfig(f"m-{slot}", "http://x/v1", "", 0.0, price) for slot, price in slots.items()}
    budget = BudgetConfig(dollars_per_hour=5)
    config = judge_config(evaluators=["judge"], protocol=protocol, budget=budget, **models)
    refused = pytest.raises(
        ConfigError, match=rf"=5 does not count .* set judge\.{missing}\.input_price and output_price"
    )
    with refused if missing else nullcontext():
        async with open_evaluator(config, LocalMeter(budget)):
            pass


@settings(max_examples=30)
@given(pairs=st.lists(st.tuples(USAGE, USAGE)))
def test_what_is_settled_is_what_was_used(pairs: list[tuple[Usage, Usage]]):
    async def run() -> LocalMeter:
        meter = LocalMeter(BudgetConfig(), lambda: 0.0)
        for estimate, actual in pairs:
            await meter.settle(await meter.reserve(estimate), estimate, actual)
        return meter

    used = asyncio.run(run()).used
    assert (used.calls, used.tokens) == (sum(a.calls for _, a in pairs), sum(a.tokens for _, a in pairs))
    assert used.dollars == pytest.approx(sum(actual.dollars for _, actual in pairs))


async def test_requests_in_flight_cannot_exceed_the_budget_together():
    meter = LocalMeter(BudgetConfig(calls_per_hour=10))
    async with judging(ScriptedOracle(), {"concurrency": 32}, meter, latency=0.1) as (evaluator, endpoint):
        found = await asyncio.gather(
            *(evaluator.evaluate(episode(ticket=n)) for n in range(20)), return_exceptions=True
        )
        assert {type(each) for each in found} == {BudgetSpent}
        assert endpoint.requests <= 10


async def test_a_spent_budget_is_raised_and_not_masked():
    meter = LocalMeter(BudgetConfig(tokens_per_hour=20_000))
    async with judging(ScriptedOracle(), meter=meter) as (evaluator, _):
        judged = [evaluator.evaluate(episode(ticket=n)) for n in range(9)]
        with pytest.raises(BudgetSpent, match=r"judge\.budget\.tokens_per_hour"):
            await asyncio.gather(*judged)
    assert meter.used.tokens <= 20_000


async def test_the_meter_counts_what_the_verdicts_report():
    meter = LocalMeter(BudgetConfig())
    faults = {"truncated": 0.2, "rate_limited": 0.2, "server_error": 0.2}
    async with judging(ScriptedOracle(), {"attempts": 9}, meter, faults=faults, retry_after=0.01) as (evaluator, end):
        verdicts = [await evaluator.evaluate(episode(ticket=n)) for n in range(3)]
    assert meter.used.calls == end.requests == sum(verdict.calls for verdict in verdicts)
    assert meter.used.tokens == sum(verdict.prompt_tokens + verdict.response_tokens for verdict in verdicts)
    assert meter.used.dollars == pytest.approx(sum(verdict.dollars for verdict in verdicts))


async def test_a_clock_that_is_set_back_and_forth_begins_no_second_budget(tmp_path: Path):
    now, budget, file = [10 * HOUR_SECONDS + 5.0], BudgetConfig(calls_per_hour=2), tmp_path / "usage.json"
    meter = LocalMeter(budget, lambda: now[0], file)
    await meter.reserve(Usage(2))
    for step in (-6.0, 6.0, -3599.0):
        now[0] += step
        with pytest.raises(BudgetSpent):
            await meter.reserve(Usage(1))
        with pytest.raises(BudgetSpent):
            await LocalMeter(budget, lambda: now[0], file).reserve(Usage(1))  # a command that continues
    now[0] = 11 * HOUR_SECONDS
    await meter.reserve(Usage(2))
