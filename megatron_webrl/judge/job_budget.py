"""The judge's budget of a whole job: counters of the control service that all workers share.

The trainer restores them from the run's folder at the start of a job and saves them there, so that a job that resumes
within the hour continues with what is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.judge.budget import (
    HOUR_SECONDS,
    USAGE_FILE,
    BudgetSpent,
    Usage,
    check_budget,
    is_limited,
    read_usage,
    write_usage,
)
from megatron_webrl.types import BUDGET_SPENT
from megatron_webrl.util.clock import steady_time

log = logging.getLogger(__name__)

_RESTORED = "judge_usage/restored"
_MICRO = 1_000_000  # counters are integers: dollars are counted in millionths


class JobUsageMeter:
    """Counts usage by hours of the clock. Implements UsageMeter; without limits it counts nothing."""

    def __init__(self, control: ControlClient, budget: BudgetConfig, clock: Callable[[], float] = steady_time) -> None:
        self._control, self._budget, self._clock = control, budget, clock
        self._limited = is_limited(budget)

    async def reserve(self, estimate: Usage) -> int:
        """Count an estimate in the current hour and return the hour. Raises BudgetSpent beyond a limit."""
        hour = int(self._clock() // HOUR_SECONDS)
        if self._limited:
            total = await asyncio.to_thread(add_usage, self._control, hour, estimate)
            try:
                check_budget(self._budget, total)
            except BaseException:
                await asyncio.to_thread(add_usage, self._control, hour, Usage() - estimate)
                raise
        return hour

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None:
        """Replace an estimate by what the request cost."""
        if self._limited:
            await asyncio.to_thread(add_usage, self._control, hour, actual - estimate)


def add_usage(control: ControlClient, hour: int, usage: Usage) -> Usage:
    """Add to the counters of an hour; returns the job's totals."""
    changes = {"calls": usage.calls, "tokens": usage.tokens, "dollars": round(usage.dollars * _MICRO)}
    calls, tokens, dollars = control.add_all({f"judge_usage/{hour}/{name}": n for name, n in changes.items()})
    return Usage(calls, tokens, dollars / _MICRO)


def restore_usage(control: ControlClient, budget: BudgetConfig, folder: Path) -> None:
    """Count what earlier jobs of the run used in their last hour; once in a job, before its first request."""
    if is_limited(budget) and not control.get_json(_RESTORED):
        control.put_json(_RESTORED, True)
        add_usage(control, *read_usage(folder / USAGE_FILE))


def save_usage(
    control: ControlClient, budget: BudgetConfig, folder: Path, clock: Callable[[], float] = steady_time
) -> None:
    """Keep the usage of the current hour in the run's folder."""
    if is_limited(budget):
        hour = int(clock() // HOUR_SECONDS)
        try:
            write_usage(folder / USAGE_FILE, hour, add_usage(control, hour, Usage()))
        except OSError as error:  # a job that resumes within the hour counts from the last file
            log.warning("%s cannot be written: %s", folder / USAGE_FILE, error)


def request_stop_without_budget(control: ControlClient, error: BudgetSpent) -> None:
    """Request the early end of the job after the budget was spent."""
    log.warning("the job ends early: %s", error)
    control.request_stop(BUDGET_SPENT)
