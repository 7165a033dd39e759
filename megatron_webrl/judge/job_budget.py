"""The judge's budget of a whole job: counters of the control plane that all workers share."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.judge.budget import HOUR_SECONDS, Usage, check_budget

_MICRO = 1_000_000  # counters are integers: dollars are counted in millionths


class JobUsageMeter:
    """Counts usage by hours of the clock. Implements UsageMeter; without limits it counts nothing."""

    def __init__(self, control: ControlClient, budget: BudgetConfig, clock: Callable[[], float] = time.time) -> None:
        self._control, self._budget, self._clock = control, budget, clock
        self._limited = any((budget.calls_per_hour, budget.tokens_per_hour, budget.dollars_per_hour))

    async def reserve(self, estimate: Usage) -> int:
        """Count an estimate in the current hour and return the hour. Raises BudgetSpent beyond a limit."""
        hour = int(self._clock() // HOUR_SECONDS)
        if self._limited:
            total = self._add(hour, estimate)
            try:
                check_budget(self._budget, total)
            except BaseException:
                self._add(hour, Usage() - estimate)
                raise
        return hour

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None:
        """Replace an estimate by what the request cost."""
        if self._limited:
            self._add(hour, actual - estimate)

    def _add(self, hour: int, usage: Usage) -> Usage:
        """Add to the counters of an hour; returns the job's totals."""
        changes = {"calls": usage.calls, "tokens": usage.tokens, "dollars": round(usage.dollars * _MICRO)}
        add = self._control.store.add
        totals = {name: int(add(f"judge_usage/{hour}/{name}", change)) for name, change in changes.items()}
        return Usage(totals["calls"], totals["tokens"], totals["dollars"] / _MICRO)
