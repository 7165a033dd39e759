"""Groups of similar processes, so that a table of many stays short. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_webrl.placement.cores import format_cores
from megatron_webrl.util.text import printable

CONTROL = "control"  # name of the role that runs the control service
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class RoleLine:
    """What a table says of one process."""

    name: str
    state: str  # as in role_status.py
    status: str  # as the process reports it
    restarts: int = 0
    node: int = 0
    heartbeat_age_seconds: float | None = None

    @property
    def kind(self) -> str:
        """rollout of rollout-3, rollout follower-1 of rollout-3.follower-1."""
        return _split(self.name)[0]

    @property
    def form(self) -> str:
        """The status line without its numbers."""
        return _NUMBER.sub("#", self.status)


@dataclass(frozen=True)
class RoleGroup:
    """Processes of one kind and state. The first one speaks for all in what they share."""

    roles: Sequence[RoleLine]

    @property
    def name(self) -> str:
        first = self.roles[0]
        numbers = [int(number) for role in self.roles if (number := _split(role.name)[1]).isdigit()]
        return f"{first.kind} {format_cores(numbers)}" if numbers else first.name

    @property
    def state(self) -> str:
        return self.roles[0].state

    @property
    def restarts(self) -> int:
        return max(role.restarts for role in self.roles)

    @property
    def nodes(self) -> str:
        return format_cores(sorted({role.node for role in self.roles}))

    @property
    def oldest_heartbeat(self) -> float | None:
        return max((role.heartbeat_age_seconds for role in self.roles if role.heartbeat_age_seconds is not None),
                   default=None)  # fmt: skip

    @property
    def status(self) -> str:
        """One status line with the range of each number; of several forms the most frequent, and of how many."""
        form, count = Counter(role.form for role in self.roles).most_common(1)[0]
        merged = printable(_merge_numbers([role.status for role in self.roles if role.form == form]))
        return merged if count == len(self.roles) else f"{count} of {len(self.roles)}: {merged}"


def group_roles(roles: Sequence[RoleLine], most: int | None = None) -> list[RoleGroup]:
    """Processes that differ only in node and in the numbers in their names and status lines.

    More than `most` groups are summed up by state; if there are still more, the last ones are left out.
    """
    groups = _group(roles, lambda role: (role.kind, role.state, role.restarts, role.form))
    if most is not None and len(groups) > most:
        groups = _group(roles, lambda role: (role.kind, role.state))[:most]
    return groups


def _group(roles: Sequence[RoleLine], key: Callable[[RoleLine], object]) -> list[RoleGroup]:
    groups: dict[object, list[RoleLine]] = {}
    for role in roles:
        groups.setdefault(key(role), []).append(role)
    return [RoleGroup(similar) for similar in groups.values()]


def _split(name: str) -> tuple[str, str]:
    """rollout-3 as (rollout, 3), rollout-3.follower-1 as (rollout follower-1, 3)."""
    process, _, part = name.partition(".")
    kind, _, number = process.rpartition("-")
    return (f"{kind} {part}".rstrip(), number) if kind and number.isdigit() else (name, "")


def _merge_numbers(texts: Sequence[str]) -> str:
    """One text for texts that differ only in numbers, with the range of each number."""
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    ranges = iter([_range(sorted(set(column), key=float)) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), texts[0])


def _range(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
