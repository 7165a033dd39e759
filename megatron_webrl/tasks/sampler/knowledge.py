"""What the trainer's task sampler has learned of units, by which it draws the tasks of tickets.

Units are environments; or tasks, websites or difficulties of task files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from megatron_webrl.config.tasks import PAGE_SOURCES, TasksConfig
from megatron_webrl.types import Task

LATEST_GROUP_WEIGHT = 0.3  # of the latest group in the moving average of a pass rate


class PassRate(NamedTuple):
    """Estimated pass rate of a unit after a number of groups."""

    rate: float
    groups: int


@dataclass
class SamplerKnowledge:
    """Estimated pass rates of units, blocked websites, and the policy version, at the time of a draw.

    Of tasks.mix each source has pass rates of its own (`of_part`).
    """

    version: int = 0
    passes: dict[str, PassRate] = field(default_factory=dict)  # by unit
    blocked: dict[str, float] = field(default_factory=dict)  # by website (host): when it ends, unix time, seconds
    parts: dict[str, Self] = field(default_factory=dict)  # by name in tasks.mix

    def of_part(self, name: str) -> Self:
        """What is known for a source of tasks.mix; "": for a source alone."""
        if not name:
            return self
        part = self.parts.setdefault(name, type(self)(blocked=self.blocked))
        part.version = self.version
        return part

    def pass_rates(self, units: Iterable[str], initial: float, trusted_groups: int = 1) -> list[float]:
        """The estimate of each unit, [units]; `initial` for one of fewer than `trusted_groups` groups."""
        untried, passes = PassRate(initial, 0), self.passes
        known = [passes.get(unit, untried) for unit in units]
        return [rate if groups >= trusted_groups else initial for rate, groups in known]

    def learn(self, unit: str, observed: float, initial: float) -> None:
        """Take in the pass rate of a group: an exponential moving average, which starts at `initial`."""
        rate, groups = self.passes.get(unit, PassRate(initial, 0))
        self.passes[unit] = PassRate(rate + LATEST_GROUP_WEIGHT * (observed - rate), groups + 1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores; the version is that of the checkpoint."""
        parts = {name: dict(part.passes) for name, part in self.parts.items()}
        return {"passes": dict(self.passes), "blocked": dict(self.blocked), "parts": parts}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], version: int) -> Self:
        made = cls(version, blocked=dict(state.get("blocked", {})))
        for name, passes in {"": state.get("passes", {}), **state.get("parts", {})}.items():
            made.of_part(name).passes = {unit: PassRate(*known) for unit, known in passes.items()}
        return made


def draws_environments(tasks: TasksConfig) -> bool:
    """Whether a ticket draws one of tasks.environments and a page seed, rather than a row of a file."""
    return tasks.source in PAGE_SOURCES


def unit_kind(tasks: TasksConfig) -> str:
    """The kind of unit whose pass rate is estimated: "environment", "task", "website" or "difficulty"."""
    return "environment" if draws_environments(tasks) else tasks.sampler.per


def unit_of(task: Task, kind: str) -> str:
    """Name of the unit of a task; `kind` as `unit_kind` returns it."""
    if kind == "task":
        return task_unit(task_key(task.id))
    return str(getattr(task, kind))


def task_key(task_id: str) -> int:
    """The 64-bit key of a task id; equal on every machine. Among 300,000 tasks two share a key by a chance of 2e-9."""
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big")


def task_unit(key: int) -> str:
    """The unit name of a task key: 16 hexadecimal digits."""
    return f"{key:016x}"
