"""Budgets of judge calls: of a process, and of a job.

The judge's budget of a whole job: counters of the control service that all workers share.

The trainer restores them from the run's folder at the start of a job and saves them there, so that a job that resumes
within the hour continues with what is left.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_webrl.config.judge import BudgetConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.client import ControlClient
from megatron_webrl.types import BUDGET_SPENT
from megatron_webrl.util import atomic_file
from megatron_webrl.util.clock import steady_time

log = logging.getLogger(__name__)

HOUR_SECONDS = 3600
USAGE_FILE = "judge_usage.json"


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


class UsageMeter(Protocol):
    """Counts usage against the budget: of one process, or of a whole job through its control service.

    A request reserves an upper estimate before it is sent, so that requests in flight cannot exceed the budget
    together, and settles it afterwards.
    """

    async def reserve(self, estimate: Usage) -> int:
        """Count `estimate` in the current hour; returns the hour, for `settle`. Raises BudgetSpent, counting nothing,
        if it would exceed a limit."""
        ...

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None:
        """Replace an estimate by what the request cost."""
        ...


class LocalMeter:
    """The budget of one process, by hours of the clock; with a file, of all processes that use it one after another."""

    def __init__(
        self, budget: BudgetConfig, clock: Callable[[], float] = steady_time, file: Path | None = None
    ) -> None:
        """`file` keeps the usage of the hour; without limits it is neither read nor written."""
        self._budget, self._clock = budget, clock
        self._file = file if is_limited(budget) else None
        self._hour, self._used = read_usage(self._file) if self._file else (-1, Usage())

    @property
    def used(self) -> Usage:
        """Usage of the hour of the last reservation."""
        return self._used

    async def reserve(self, estimate: Usage) -> int:
        hour = int(self._clock() // HOUR_SECONDS)
        if not self._hour - 1 <= hour <= self._hour:  # a clock set back by less than an hour begins no new budget
            self._hour, self._used = hour, Usage()
        check_budget(self._budget, self._used + estimate)
        self._count(estimate)
        return self._hour

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None:
        if hour == self._hour:
            self._count(actual - estimate)

    def _count(self, usage: Usage) -> None:
        self._used += usage
        if self._file:
            write_usage(self._file, self._hour, self._used)


def is_limited(budget: BudgetConfig) -> bool:
    """Whether the budget has a limit."""
    return any((budget.calls_per_hour, budget.tokens_per_hour, budget.dollars_per_hour))


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


class Priced(Protocol):
    """US dollars for a million tokens."""

    @property
    def input_price(self) -> float: ...

    @property
    def output_price(self) -> float: ...


def check_prices(budget: BudgetConfig, models: Mapping[str, Priced]) -> None:
    """Raise ConfigError if a limit in dollars does not count a model. `models`: by the slots that are used."""
    for slot, model in models.items():
        if budget.dollars_per_hour and not model.input_price and not model.output_price:
            raise ConfigError(
                f"judge.budget.dollars_per_hour={budget.dollars_per_hour:g} does not count the model of judge.{slot}, "
                f"which has no price; set judge.{slot}.input_price and output_price (US dollars for a million tokens; "
                "0.001 for a free model), or limit calls_per_hour or tokens_per_hour instead"
            )


def check_budget(budget: BudgetConfig, total: Usage) -> None:
    """Raise BudgetSpent if the usage of an hour exceeds a limit."""
    for name, used, limit in (
        ("calls", total.calls, budget.calls_per_hour),
        ("tokens", total.tokens, budget.tokens_per_hour),
        ("dollars", total.dollars, budget.dollars_per_hour),
    ):
        if limit and used > limit:
            raise BudgetSpent(
                f"the next request would use {used:g} {name} this hour, the limit is {limit:g} "
                f"(judge.budget.{name}_per_hour); raise it, or continue in the next hour"
            )


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
