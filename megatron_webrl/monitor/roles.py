"""The processes of a job as rows of a table: similar ones share a row, so that thousands fit a page. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_webrl.placement.cores import format_cores
from megatron_webrl.util.text import printable

CONTROL = "control"  # name of the role that runs the control service
COLUMNS = ("process", "nodes", "state", "heartbeat, s ago", "restarts", "status")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class RoleStatus:
    """One process."""

    name: str
    state: str  # running, starting, silent, failed, ended, not started; unknown if the job does not respond
    status: str  # as the process reports it; the last line of its log if the job does not respond
    restarts: int = 0
    node: int = 0
    heartbeat_age_seconds: float | None = None


def role_rows(roles: Sequence[RoleStatus]) -> list[tuple[str, ...]]:
    """Rows of COLUMNS. Processes that differ only in node and in numbers of names and status share one, with ranges."""
    groups: dict[tuple[object, ...], list[RoleStatus]] = {}
    for role in roles:
        form = _NUMBER.sub("#", role.status)
        groups.setdefault((_split(role.name)[0], role.state, role.restarts, form), []).append(role)
    return [_row(similar) for similar in groups.values()]


def _row(roles: Sequence[RoleStatus]) -> tuple[str, ...]:
    first = roles[0]
    numbers = [int(number) for role in roles if (number := _split(role.name)[1])]
    ages = [role.heartbeat_age_seconds for role in roles if role.heartbeat_age_seconds is not None]
    columns = zip(*(_NUMBER.findall(role.status) for role in roles), strict=True)
    ranges = iter([_range(sorted(set(column), key=float)) for column in columns])
    return (
        f"{_split(first.name)[0]} {format_cores(sorted(numbers))}" if numbers else first.name,
        format_cores(sorted({role.node for role in roles})),
        first.state,
        f"{max(ages):.1f}" if ages else "",
        str(first.restarts or ""),
        printable(_NUMBER.sub(lambda _: next(ranges), first.status)),
    )


def _range(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _split(name: str) -> tuple[str, str]:
    """rollout-3 as (rollout, 3), rollout-3.follower-1 as (rollout follower-1, 3)."""
    process, _, part = name.partition(".")
    kind, _, number = process.rpartition("-")
    return (f"{kind} {part}".rstrip(), number) if kind and number.isdigit() else (name, "")
