"""Engine utilization between two calls and memory of the workers, from what they publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_webrl.control.client import ControlClient

RUNNING_SUMS = ("seconds", "busy", "requests", "episodes")
MEMORY = ("gib", "peak_gib")


class EngineUtilization:
    """Differences of the loads that workers report (rollout/engine/engine_load.py)."""

    def __init__(self, control: ControlClient, workers: Sequence[str]) -> None:
        self._control, self._workers = control, workers
        self._previous: dict[str, Any] = {}  # last sums by worker

    def pop_metrics(self) -> dict[str, float]:
        """Since the last call: idle share of engine time, mean requests per engine, mean running episodes by worker.

        Memory is that of the worker that has most.
        """
        total: Counter[str] = Counter()
        memory: dict[str, float] = {}
        reports = self._control.role_reports()
        for worker in self._workers:
            if not (sums := reports.get(worker, {}).get("load")):
                continue
            before = self._previous.get(worker)
            if before is None or before["instance_id"] != sums["instance_id"]:
                before = dict.fromkeys(RUNNING_SUMS, 0.0)
            total.update({name: sums[name] - before[name] for name in RUNNING_SUMS})
            self._previous[worker] = sums
            memory = {name: max(memory.get(name, 0.0), sums[name]) for name in MEMORY}
        if not total["seconds"]:
            return {}
        return {
            "engine/idle_fraction": 1 - total["busy"] / total["seconds"],
            "engine/running_requests": total["requests"] / total["seconds"],
            "engine/running_episodes": total["episodes"] / total["seconds"],
            "memory/worker_gib": memory["gib"],
            "memory/worker_peak_gib": memory["peak_gib"],
        }
