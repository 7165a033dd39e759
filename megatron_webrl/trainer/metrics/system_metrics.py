"""Speed, memory and use of the engines: metrics of the machines."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from megatron_webrl.control.client import ControlClient
from megatron_webrl.placement.hardware import find_card
from megatron_webrl.track.process_memory import private_gib
from megatron_webrl.trainer.parallel import all_reduce_max

RUNNING_SUMS = ("seconds", "busy", "requests", "episodes")
MEMORY = ("gib", "peak_gib")


def performance_metrics(
    tokens: float, operations: float, seconds: float, ranks: int, peak_tflops: float | None
) -> dict[str, float]:
    """Metrics by MLflow name. `operations`: useful ones of all ranks; `peak_tflops`: of a rank, None if not known."""
    tflops = operations / seconds / ranks / 1e12
    metrics = {
        "performance/tokens_per_second_per_gpu": tokens / seconds / ranks,
        "performance/tflops_per_gpu": tflops,
    }
    return metrics if peak_tflops is None else metrics | {"performance/mfu": tflops / peak_tflops}


def known_peak_tflops(device: torch.device, dtype: str) -> float | None:
    """The peak of this rank's card in `dtype`, TFLOP/s; None on the CPU, for other cards and in float32."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    card = find_card(torch.cuda.get_device_name(device))
    return None if card is None else card.peak_tflops


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Of the rank that has most; `device` is the platform's. The peak of the GPU begins again. Collective."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics = {
        "memory/trainer_gib": all_reduce_max(private_gib(), device),
        "memory/trainer_peak_gib": all_reduce_max(peak_bytes / 2**30, device),
    }
    if device.type == "cuda":
        gpu_bytes = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        metrics["memory/trainer_gpu_gib"] = all_reduce_max(gpu_bytes / 2**30, device)
    return metrics


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
