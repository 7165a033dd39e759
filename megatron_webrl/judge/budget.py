"""The budget of judge calls in each hour of the clock: of a process, or of a job.

A job counts in its control service, which all workers share. The trainer restores the counters from the run's folder at
the start of a job and saves them there, so that a job that resumes within the hour continues with what is left.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.types import BUDGET_SPENT
from megatron_webrl.util import atomic_file
from megatron_webrl.util.clock import steady_time

log = logging.getLogger(__name__)

HOUR_SECONDS = 3600
USAGE_FILE = "judge_usage.json"
_RESTORED = "judge_usage/restored"
_MICRO = 1_000_000  # counters are integers: dollars are counted in millionths


class BudgetSpent(Exception):
    """A request would exceed judge.budget. The message is one line that names the limit."""


@dataclass(frozen=True)
class Usage:
    """Requests to judge models, and what they cost."""

    calls: int = 0
    tokens: int = 0  # of prompts and responses
    dollars: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.calls + other.calls, self.tokens + other.tokens, self.dollars + other.dollars)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.calls - other.calls, self.tokens - other.tokens, self.dollars - other.dollars)


class UsageMeter:
    """Counts usage against the budget.

    A request reserves an upper estimate before it is sent, so that requests in flight cannot exceed the budget
    together, and settles it afterwards.
    """

    def __init__(self, budget: BudgetConfig, clock: Callable[[], float] = steady_time) -> None:
        self._budget, self._clock = budget, clock

    async def reserve(self, estimate: Usage) -> int:
        """Count `estimate` in the current hour; returns the hour, for `settle`. Raises BudgetSpent, counting nothing,
        if it would exceed a limit."""
        hour, total = await self._add(int(self._clock() // HOUR_SECONDS), estimate)
        for name, limit in limits(self._budget).items():
            if (used := getattr(total, name)) > limit:
                await self._add(hour, Usage() - estimate)
                raise BudgetSpent(
                    f"the next request would use {used:g} {name} this hour, the limit is {limit:g} "
                    f"(judge.budget.{name}_per_hour); raise it, or continue in the next hour"
                )
        return hour

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None:
        """Replace an estimate by what the request cost."""
        await self._add(hour, actual - estimate)

    @abstractmethod
    async def _add(self, hour: int, usage: Usage) -> tuple[int, Usage]:
        """Count in an hour; returns the hour in which it was counted, and its total."""


class LocalMeter(UsageMeter):
    """The budget of one process; with a file, of all processes that use it one after another."""

    def __init__(
        self, budget: BudgetConfig, clock: Callable[[], float] = steady_time, file: Path | None = None
    ) -> None:
        """`file` keeps the usage of the hour; without limits it is neither read nor written."""
        super().__init__(budget, clock)
        self._file = file if limits(budget) else None
        self._hour, self.used = read_usage(self._file) if self._file else (-1, Usage())

    async def _add(self, hour: int, usage: Usage) -> tuple[int, Usage]:
        if hour > self._hour or hour < self._hour - 1:  # a clock set back by less than an hour begins no new budget
            self._hour, self.used = hour, Usage()
        self.used += usage
        if self._file:
            write_usage(self._file, self._hour, self.used)
        return self._hour, self.used

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None:
        if hour == self._hour:
            await super().settle(hour, estimate, actual)


class JobUsageMeter(UsageMeter):
    """The budget of a job; without limits it counts nothing."""

    def __init__(self, control: ControlClient, budget: BudgetConfig, clock: Callable[[], float] = steady_time) -> None:
        super().__init__(budget, clock)
        self._control = control

    async def _add(self, hour: int, usage: Usage) -> tuple[int, Usage]:
        counts = bool(limits(self._budget))
        return hour, await asyncio.to_thread(add_usage, self._control, hour, usage) if counts else Usage()


def limits(budget: BudgetConfig) -> dict[str, float]:
    """The limits that are set, by the fields of Usage."""
    return {name: limit for name in ("calls", "tokens", "dollars") if (limit := getattr(budget, f"{name}_per_hour"))}


def read_usage(file: Path) -> tuple[int, Usage]:
    """The hour of a usage file and its usage; hour -1 without a file. A damaged file counts nothing and is logged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return int(found.pop("hour")), Usage(**found)
    except FileNotFoundError:
        return -1, Usage()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s cannot be read: %s; this hour's budget is counted from 0", file, error)
        return -1, Usage()


def write_usage(file: Path, hour: int, usage: Usage) -> None:
    """Replace a usage file atomically."""
    atomic_file.write_json(file, {"hour": hour, **asdict(usage)})


def add_usage(control: ControlClient, hour: int, usage: Usage) -> Usage:
    """Add to the counters of an hour; returns the job's totals."""
    changes = {"calls": usage.calls, "tokens": usage.tokens, "dollars": round(usage.dollars * _MICRO)}
    calls, tokens, dollars = control.add_all({f"judge_usage/{hour}/{name}": n for name, n in changes.items()})
    return Usage(calls, tokens, dollars / _MICRO)


def restore_usage(control: ControlClient, budget: BudgetConfig, folder: Path) -> None:
    """Count what earlier jobs of the run used in their last hour; once in a job, before its first request."""
    if limits(budget) and not control.get_json(_RESTORED):
        control.put_json(_RESTORED, True)
        add_usage(control, *read_usage(folder / USAGE_FILE))


def save_usage(
    control: ControlClient, budget: BudgetConfig, folder: Path, clock: Callable[[], float] = steady_time
) -> None:
    """Keep the usage of the current hour in the run's folder."""
    if limits(budget):
        hour = int(clock() // HOUR_SECONDS)
        try:
            write_usage(folder / USAGE_FILE, hour, add_usage(control, hour, Usage()))
        except OSError as error:  # a job that resumes within the hour counts from the last file
            log.warning("%s cannot be written: %s", folder / USAGE_FILE, error)


def request_stop_without_budget(control: ControlClient, error: BudgetSpent) -> None:
    """Request the early end of the job after the budget was spent."""
    log.warning("the job ends early: %s", error)
    control.request_stop(BUDGET_SPENT)
