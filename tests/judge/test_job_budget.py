"""The judge's budget, counted over all workers of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.judge.budget import USAGE_FILE, BudgetSpent, JobUsageMeter, Usage, restore_usage, save_usage
from tests.job_control import control_service


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    with control_service(tmp_path) as address:
        yield address


def meter(job: Path, worker: int, budget: BudgetConfig, hour: list[int]) -> JobUsageMeter:
    control = ControlClient(job, f"rollout-{worker}")
    return JobUsageMeter(control, budget, lambda: hour[0] * 3600.0)


def test_workers_share_the_budget_of_an_hour(job: Path) -> None:
    hour, budget = [7], BudgetConfig(calls_per_hour=3, dollars_per_hour=1.0)
    first, second = (meter(job, worker, budget, hour) for worker in range(2))
    estimate = Usage(1, 500, 0.25)

    async def spend() -> None:
        reserved = await first.reserve(estimate)
        await first.settle(reserved, estimate, Usage(1, 100, 0.125))
        await second.reserve(estimate)
        await second.reserve(estimate)
        with pytest.raises(BudgetSpent, match=r"4 calls this hour, the limit is 3 \(judge.budget.calls_per_hour\)"):
            await first.reserve(estimate)
        with pytest.raises(BudgetSpent, match=r"1.125 dollars this hour"):
            await second.reserve(Usage(0, 0, 0.5))
        await second.reserve(Usage(0, 0, 0.375))  # what was refused has not been counted
        hour[0] += 1
        await first.reserve(estimate)

    asyncio.run(spend())


@pytest.fixture
def jobs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_job_that_resumes_within_the_hour_continues_with_what_is_left(tmp_path: Path, jobs: ExitStack) -> None:
    hour, budget, estimate = [7], BudgetConfig(calls_per_hour=3, dollars_per_hour=9), Usage(1, 500, 0.25)
    run = tmp_path / "run"
    run.mkdir()
    controls = []
    for number in range(3):
        (folder := tmp_path / f"job-{number}").mkdir()
        controls.append(ControlClient(jobs.enter_context(control_service(folder)), "trainer-0"))

    async def spend(job: int, times: int) -> None:
        for _ in range(times):
            await meter(controls[job].address_file, 0, budget, hour).reserve(estimate)

    restore_usage(controls[0], budget, run)
    asyncio.run(spend(0, times=2))
    save_usage(controls[0], budget, run, lambda: hour[0] * 3600.0)
    restore_usage(controls[0], budget, run)  # by a trainer that was restarted in the job: counts nothing twice
    asyncio.run(spend(0, times=1))
    save_usage(controls[0], budget, run, lambda: hour[0] * 3600.0)

    restore_usage(controls[1], budget, run)
    with pytest.raises(BudgetSpent, match="4 calls this hour, the limit is 3"):
        asyncio.run(spend(1, times=1))
    hour[0] += 1
    restore_usage(controls[2], budget, run)
    asyncio.run(spend(2, times=3))


def test_without_limits_nothing_is_counted(job: Path, tmp_path: Path) -> None:
    unlimited = meter(job, 0, BudgetConfig(), [0])
    asyncio.run(unlimited.reserve(Usage(1, 10**12, 10.0**6)))
    control = ControlClient(job, "trainer-0")
    restore_usage(control, BudgetConfig(), tmp_path)
    save_usage(control, BudgetConfig(), tmp_path)
    assert control.get_json("judge_usage/0/calls") is None
    assert not (tmp_path / USAGE_FILE).exists()
