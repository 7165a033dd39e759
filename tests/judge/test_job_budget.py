"""The judge's budget, counted over all workers of a job."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.judge.budget import BudgetSpent, Usage
from megatron_webrl.judge.job_budget import JobUsageMeter


@pytest.fixture
def store() -> TCPStore:
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


def test_without_limits_nothing_is_counted(store: TCPStore) -> None:
    unlimited = meter(store, 0, BudgetConfig(), [0])
    keys = store.num_keys()
    asyncio.run(unlimited.reserve(Usage(1, 10**12, 10.0**6)))
    assert store.num_keys() == keys
