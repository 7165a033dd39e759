"""What judging costs, and the budget of an hour."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_webrl.config.judge import BudgetConfig

HOUR_SECONDS = 3600


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
    """Counts usage against the budget: of one process, or of a whole job through its control plane.

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
    """The budget of one process, by hours of the clock."""

    def __init__(self, budget: BudgetConfig, clock: Callable[[], float] = time.time) -> None:
        self._budget, self._clock = budget, clock
        self._hour, self._used = -1, Usage()

    @property
    def used(self) -> Usage:
        """Usage of the hour of the last reservation."""
        return self._used

    async def reserve(self, estimate: Usage) -> int:
        hour = int(self._clock() // HOUR_SECONDS)
        if hour != self._hour:
            self._hour, self._used = hour, Usage()
        check_budget(self._budget, self._used + estimate)
        self._used += estimate
        return hour

    async def settle(self, hour: int, estimate: Usage, actual: Usage) -> None:
        if hour == self._hour:
            self._used += actual - estimate


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
