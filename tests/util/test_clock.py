import time
from collections.abc import Callable

import pytest

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.judge.budget import BudgetSpent, LocalMeter, Usage
from megatron_webrl.util.clock import steady_time


@pytest.fixture(params=[-3600.0, 3600.0, 3e7])
def step_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the clock of this process by an hour, or by a year."""
    read = time.time
    return lambda: monkeypatch.setattr(time, "time", lambda: read() + request.param)


def test_steady_time_is_unix_time_and_a_step_of_the_clock_does_not_change_it(step_clock: Callable[[], None]):
    before, shown = steady_time(), time.time()
    assert abs(before - shown) < 5
    step_clock()
    assert abs(time.time() - shown) > 3000
    assert 0 <= steady_time() - before < 60


async def test_the_judges_budget_survives_a_step_of_the_clock(step_clock: Callable[[], None]):
    meter = LocalMeter(BudgetConfig(calls_per_hour=1))
    await meter.reserve(Usage(1))
    step_clock()
    with pytest.raises(BudgetSpent):
        await meter.reserve(Usage(1))
