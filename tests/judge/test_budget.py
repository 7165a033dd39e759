"""The budget of an hour: of one process, and over all workers of a job."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.client import ControlClient
from megatron_webrl.judge.budget import (
    HOUR_SECONDS,
    USAGE_FILE,
    BudgetSpent,
    JobUsageMeter,
    LocalMeter,
    Usage,
    restore_usage,
    save_usage,
)
from megatron_webrl.judge.evaluation import open_evaluator
from tests.job_control import control_service
from tests.judge.support import ScriptedOracle, episode, judging


async def test_a_reservation_beyond_a_limit_is_refused_and_counts_nothing():
    for name, limit in (("calls", 2), ("tokens", 100), ("dollars", 0.5)):
        meter = LocalMeter(BudgetConfig(**{f"{name}_per_hour": limit}))
        await meter.reserve(Usage(1, 50, 0.25))
        await meter.reserve(Usage(1, 50, 0.25))
        with pytest.raises(BudgetSpent, match=rf"{name} this hour, the limit is .* \(judge.budget.{name}_per_hour\)"):
            await meter.reserve(Usage(1, 50, 0.25))
        assert meter.used == Usage(2, 100, 0.5)


async def test_processes_one_after_another_share_the_budget_through_a_file(tmp_path: Path):
    now, file, budget = [7200.0], tmp_path / "usage.json", BudgetConfig(calls_per_hour=3)
    await LocalMeter(BudgetConfig(), file=file).reserve(Usage(1, 9))
    assert not file.exists()  # without limits
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


async def test_a_limit_in_dollars_needs_the_prices_of_all_models_in_use():
    budget = BudgetConfig(dollars_per_hour=5)
    for protocol, slots, missing in (
        ("rubric", {"verdict": 0.0}, "verdict"), ("rubric", {"verdict": 1.0, "relevance": 0.0}, "relevance"),
        ("webjudge", {"verdict": 1.0, "relevance": 0.0}, "relevance"), ("rubric", {"verdict": 1.0}, None),
        ("webvoyager", {"verdict": 1.0}, None),
    ):  # fmt: skip
        models = {slot: JudgeModelConfig(f"m-{slot}", "http://x/v1", "", 0.0, price) for slot, price in slots.items()}
        config = judge_config(evaluators=["judge"], protocol=protocol, budget=budget, **models)
        words = rf"judge\.budget\.dollars_per_hour=5 .* judge\.{missing}\.input_price"
        with pytest.raises(ConfigError, match=words) if missing else nullcontext():
            async with open_evaluator(config, LocalMeter(budget)):
                pass


async def test_requests_in_flight_cannot_exceed_the_budget_together_and_the_error_is_not_masked():
    for budget, most in ((BudgetConfig(calls_per_hour=10), 10), (BudgetConfig(tokens_per_hour=20_000), 100)):
        meter = LocalMeter(budget)
        async with judging(ScriptedOracle(), {"concurrency": 32}, meter, latency=0.05) as (evaluator, endpoint):
            judged = [evaluator.evaluate(episode(ticket=n)) for n in range(20)]
            found = await asyncio.gather(*judged, return_exceptions=True)
        assert {type(each) for each in found} == {BudgetSpent}
        assert 0 < endpoint.requests <= most
        assert meter.used.tokens <= (budget.tokens_per_hour or 10**6)


async def test_the_meter_counts_what_the_verdicts_report():
    meter = LocalMeter(BudgetConfig())
    faults = {"truncated": 0.2, "rate_limited": 0.2, "server_error": 0.2}
    async with judging(ScriptedOracle(), {"attempts": 9}, meter, faults=faults, retry_after=0.01) as (evaluator, end):
        verdicts = [await evaluator.evaluate(episode(ticket=n)) for n in range(3)]
    assert meter.used.calls == end.requests == sum(verdict.calls for verdict in verdicts)
    assert meter.used.tokens == sum(verdict.prompt_tokens + verdict.response_tokens for verdict in verdicts)
    assert meter.used.dollars == pytest.approx(sum(verdict.dollars for verdict in verdicts))


async def test_each_hour_has_its_budget_and_a_clock_that_is_set_back_and_forth_none(tmp_path: Path):
    now, budget, file = [10 * HOUR_SECONDS + 5.0], BudgetConfig(calls_per_hour=2), tmp_path / "usage.json"
    meter = LocalMeter(budget, lambda: now[0], file)
    await meter.reserve(Usage(2))
    for step in (-6.0, 6.0, -3599.0):
        now[0] += step
        for each in (meter, LocalMeter(budget, lambda: now[0], file)):  # the second: a command that continues
            with pytest.raises(BudgetSpent):
                await each.reserve(Usage(1))
    now[0] = 11 * HOUR_SECONDS
    await meter.settle(await meter.reserve(Usage(2, 20)), Usage(2, 20), Usage(1, 20))
    await meter.settle(10, Usage(2), Usage(1, 500))  # of the last hour
    assert meter.used == Usage(1, 20)


ESTIMATE = Usage(1, 500, 0.25)


async def test_workers_share_the_budget_of_an_hour(tmp_path: Path):
    hour, budget = [7], BudgetConfig(calls_per_hour=3, dollars_per_hour=1.0)
    with control_service(tmp_path) as address:
        first, second = (
            JobUsageMeter(ControlClient(address, f"rollout-{worker}"), budget, lambda: hour[0] * 3600.0)
            for worker in range(2)
        )
        await first.settle(await first.reserve(ESTIMATE), ESTIMATE, Usage(1, 100, 0.125))
        await second.reserve(ESTIMATE)
        await second.reserve(ESTIMATE)
        with pytest.raises(BudgetSpent, match=r"4 calls this hour, the limit is 3 \(judge.budget.calls_per_hour\)"):
            await first.reserve(ESTIMATE)
        with pytest.raises(BudgetSpent, match=r"1.125 dollars this hour"):
            await second.reserve(Usage(0, 0, 0.5))
        await second.reserve(Usage(0, 0, 0.375))  # what was refused has not been counted
        hour[0] += 1
        await first.reserve(ESTIMATE)


async def test_a_job_that_resumes_within_the_hour_continues_with_what_is_left(tmp_path: Path):
    hour, budget, controls = [7], BudgetConfig(calls_per_hour=3, dollars_per_hour=9), list[ControlClient]()
    clock = lambda: hour[0] * 3600.0  # noqa: E731
    with ExitStack() as jobs:
        for number in range(3):
            (folder := tmp_path / f"job-{number}").mkdir()
            controls.append(ControlClient(jobs.enter_context(control_service(folder)), "trainer-0"))
        for times in (2, 1):  # the second: a trainer that was restarted in the job counts nothing twice
            restore_usage(controls[0], budget, tmp_path)
            for _ in range(times):
                await JobUsageMeter(controls[0], budget, clock).reserve(ESTIMATE)
            save_usage(controls[0], budget, tmp_path, clock)
        save_usage(controls[0], budget, tmp_path / USAGE_FILE, clock)  # a folder that cannot be written ends no job
        restore_usage(controls[1], budget, tmp_path)
        with pytest.raises(BudgetSpent, match="4 calls this hour, the limit is 3"):
            await JobUsageMeter(controls[1], budget, clock).reserve(ESTIMATE)
        hour[0] += 1
        restore_usage(controls[2], budget, tmp_path)
        for _ in range(3):
            await JobUsageMeter(controls[2], budget, clock).reserve(ESTIMATE)
        (tmp_path / USAGE_FILE).unlink()
        await JobUsageMeter(controls[2], BudgetConfig(), lambda: 0.0).reserve(Usage(1, 10**12, 10.0**6))
        save_usage(controls[2], BudgetConfig(), tmp_path)
        assert controls[2].get_json("judge_usage/0/calls") is None  # without limits nothing is counted
        assert not (tmp_path / USAGE_FILE).exists()
