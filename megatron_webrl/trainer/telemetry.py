"""What the loop measures of an update: spans of the timeline, durations, speed, memory, profiles."""

from __future__ import annotations

import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.placement.hardware import find_card
from megatron_webrl.track.metrics import UpdateSeconds, rollout_seconds
from megatron_webrl.track.process_memory import private_gib
from megatron_webrl.track.timeline import PROFILES, Timeline
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.learner import Metrics
from megatron_webrl.trainer.metrics.logprob_mismatch import LogprobMismatch
from megatron_webrl.trainer.parallel import all_reduce_max
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.types import Group
from megatron_webrl.util.atomic_file import continue_without

RUNNING_SUMS = ("seconds", "busy", "requests", "episodes")
MEMORY = ("gib", "peak_gib")


@dataclass(frozen=True)
class UpdateResult:
    """What the loop knows of the update that made policy `version`."""

    version: int
    groups: Sequence[Group]
    metrics: Metrics
    mismatch: LogprobMismatch
    seconds: UpdateSeconds
    system_metrics: dict[str, float]  # of the weight transfer and memory


class Telemetry:
    """Phases of the loop, one after the other, as spans of the timeline; the metrics of each update from them."""

    def __init__(self, config: Config, timeline: Timeline, packer: SequencePacker, syncer: WeightSyncer) -> None:
        self._config, self._packer, self._syncer, self._timeline = config, packer, syncer, timeline
        self._started = time.monotonic()  # of the update, at the end of the one before
        self._phase = ExitStack()
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of the update, by phase

    def phase(self, name: str = "", version: int = -1) -> None:
        """End the current phase, and begin another one if it has a name; profile the phase "train" of chosen updates.

        `version`: the one that the update makes.
        """
        self._phase.close()
        if name == "train":
            self._phase.enter_context(profiled(self._config, torch.distributed.get_rank(), version, self._timeline))
        if name:
            self._phase.enter_context(self._measured(name, version))

    @contextmanager
    def _measured(self, name: str, version: int) -> Iterator[None]:
        with self._timeline.span(name, version=version) as span:
            yield
        self._seconds[name] += span.seconds

    def finish_update(
        self, version: int, groups: Sequence[Group], metrics: Metrics, mismatch: LogprobMismatch, sync_seconds: float
    ) -> UpdateResult:
        """The update that made `version`, with its durations and system metrics. Collective."""
        device, seconds = self._packer.device, self._seconds
        image_wait = all_reduce_max(self._packer.wait_timer.pop_seconds(), device)
        rollout = rollout_seconds([t for group in groups for t in group.trajectories])
        peak, ranks = known_peak_tflops(device, self._config.model.dtype), torch.distributed.get_world_size()
        system = self._syncer.metrics | memory_metrics(device)
        system |= performance_metrics(metrics["tokens"], metrics["operations"], seconds["train"], ranks, peak)
        finished = time.monotonic()
        tickets = [(group.trajectories[0].restart_epoch, group.ticket) for group in groups]
        self._timeline.record("update", self._started, finished, version=version, tickets=tickets)
        self._started, self._seconds = finished, defaultdict(float)
        durations = UpdateSeconds(rollout, seconds["train"], sync_seconds, seconds["wait for groups"], image_wait)
        return UpdateResult(version, groups, metrics, mismatch, durations, system)


@contextmanager
def profiled(config: Config, rank: int, version: int, timeline: Timeline) -> Iterator[None]:
    """Profile what trains `version`, if trainer.profile_updates has it and this is rank 0: profiles/ of the run."""
    if rank or version not in config.trainer.profile_updates:
        yield
        return
    path = config.run_folder / PROFILES / f"update-{version:06d}.trainer-{rank}.json.gz"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with (
        torch.profiler.profile(activities=activities) as profiler,
        timeline.span("profile", version=version, file=path.name),
    ):
        yield
    with timeline.span("write profile"), continue_without(str(path)):
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))


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
