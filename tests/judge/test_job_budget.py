"""The judge's budget, counted over all workers of a job."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.judge.budget import BudgetSpent, Usage
from megatron_webrl.judge.job_budget import JobUsageMeter, restore_usage, save_usage


@pytest.fixture
def store() -> TCPStore:
    return new_store()


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def meter(store: TCPStore, worker: int, budget: BudgetConfig, hour: list[int]) -> JobUsageMeter:
    control = ControlClient("127.0.0.1", store.port, f"rollout-{worker}", 60.0)
    return JobUsageMeter(control, budget, lambda: hour[0] * 3600.0)


def test_workers_share_the_budget_of_an_hour(store: TCPStore) -> None:
    hour, budget = [7], BudgetConfig(calls_per_hour=3, dollars_per_hour=1.0)
    first, second = (meter(store, worker, budget, hour) for worker in range(2))
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


def test_a_job_that_resumes_within_the_hour_continues_with_what_is_left(tmp_path: Path) -> None:
    hour, budget, estimate = [7], BudgetConfig(calls_per_hour=3, dollars_per_hour=9), Usage(1, 500, 0.25)
    stores = [new_store() for _ in range(3)]
    controls = [ControlClient("127.0.0.1", store.port, "trainer-0", 60.0) for store in stores]

    async def spend(job: int, times: int) -> None:
        for _ in range(times):
            await meter(stores[job], 0, budget, hour).reserve(estimate)

    restore_usage(controls[0], budget, tmp_path)
    asyncio.run(spend(0, times=2))
    save_usage(controls[0], budget, tmp_path, lambda: hour[0] * 3600.0)
    restore_usage(controls[0], budget, tmp_path)  # by a trainer that was restarted in the job: counts nothing twice
    asyncio.run(spend(0, times=1))
    save_usage(controls[0], budget, tmp_path, lambda: hour[0] * 3600.0)

    restore_usage(controls[1], budget, tmp_path)
    with pytest.raises(BudgetSpent, match="4 calls this hour, the limit is 3"):
        asyncio.run(spend(1, times=1))
    hour[0] += 1
    restore_usage(controls[2], budget, tmp_path)
    asyncio.run(spend(2, times=3))


def test_without_limits_nothing_is_counted(store: TCPStore, tmp_path: Path) -> None:
    unlimited = meter(store, 0, BudgetConfig(), [0])
    keys = store.num_keys()
    asyncio.run(unlimited.reserve(Usage(1, 10**12, 10.0**6)))
    control = ControlClient("127.0.0.1", store.port, "trainer-0", 60.0)
    restore_usage(control, BudgetConfig(), tmp_path)
    save_usage(control, BudgetConfig(), tmp_path)
    assert store.num_keys() == keys
    assert not list(tmp_path.iterdir())
