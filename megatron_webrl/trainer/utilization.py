"""How busy the engines were between two looks, from the running sums that the workers tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_webrl.control import Control

SUMS = ("seconds", "busy", "requests", "episodes")


class Utilization:
    """Differences of `occupancy/<worker>` (rollout/occupancy.py), over all workers."""

    def __init__(self, control: Control, workers: Sequence[str]) -> None:
        self._control, self._workers = control, workers
        self._seen: dict[str, Any] = {}  # what each worker told last

    def take(self) -> dict[str, float]:
        """Figures since the last call by their MLflow names; nothing where no worker told anything.

        `engine/idle_share`: share of the time in which an engine had no request; `engine/requests`: mean number of
        requests in an engine; `engine/episodes`: mean number of episodes under way at a worker.
        """
        total: Counter[str] = Counter()
        for worker in self._workers:
            told: Any = self._control.value(f"occupancy/{worker}")
            if told is None:
                continue
            before = self._seen.get(worker)
            if before is None or before["life"] != told["life"]:
                before = dict.fromkeys(SUMS, 0.0)
            total.update({name: told[name] - before[name] for name in SUMS})
            self._seen[worker] = told
        if not total["seconds"]:
            return {}
        return {
            "engine/idle_share": 1 - total["busy"] / total["seconds"],
            "engine/requests": total["requests"] / total["seconds"],
            "engine/episodes": total["episodes"] / total["seconds"],
        }
