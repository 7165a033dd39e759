import time

import pytest

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.judge.budget import BudgetSpent, LocalMeter, Usage
from megatron_webrl.util.clock import steady_time


@pytest.mark.parametrize("seconds", [-3600.0, 3e7])
async def test_a_step_of_the_clock_changes_neither_steady_time_nor_the_judges_budget(
    seconds: float, monkeypatch: pytest.MonkeyPatch
):
    read, before = time.time, steady_time()
    assert abs(before - read()) < 5
    meter = LocalMeter(BudgetConfig(calls_per_hour=1))
    await meter.reserve(Usage(1))
    monkeypatch.setattr(time, "time", lambda: read() + seconds)
    assert 0 <= steady_time() - before < 60
    with pytest.raises(BudgetSpent):
        await meter.reserve(Usage(1))
