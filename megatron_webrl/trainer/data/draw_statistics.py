"""How much of a task file has been drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_webrl.tasks.sampler.units import task_key, task_unit
from megatron_webrl.types import Task


class DrawStatistics:
    """Tasks and websites of closed tickets, and the tickets that drew a task again."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        """`saved`: an earlier `state_dict`, or empty."""
        self._tasks, self._websites = set(saved.get("tasks", ())), set(saved.get("websites", ()))
        self._duplicates = int(saved.get("duplicates", 0))

    def add(self, task: Task) -> None:
        """Count the task of a closed ticket."""
        unit = task_unit(task_key(task.id))
        self._duplicates += unit in self._tasks
        self._tasks.add(unit)
        self._websites.add(task.website)

    def metrics(self) -> dict[str, float]:
        """Metrics over the whole run by MLflow name."""
        return {
            "sampler/tasks_seen": float(len(self._tasks)),
            "sampler/websites_seen": float(len(self._websites)),
            "sampler/duplicate_tasks": float(self._duplicates),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "tasks": sorted(self._tasks), "websites": sorted(self._websites), "duplicates": self._duplicates
        }  # fmt: skip
