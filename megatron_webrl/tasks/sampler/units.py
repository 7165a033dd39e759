"""Units whose pass rates samplers estimate: environments, or tasks, websites or difficulties of task files."""

from __future__ import annotations

import hashlib

from megatron_webrl.config.tasks import PAGE_SOURCES, TasksConfig
from megatron_webrl.types import Task


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
