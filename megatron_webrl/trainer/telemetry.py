"""What the loop measures of an update: spans of the timeline, durations, speed, memory, profiles."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.profiler import ProfilerActivity

from megatron_webrl.config.schema import Config
from megatron_webrl.track.metrics import UpdateSeconds, rollout_seconds
from megatron_webrl.track.timeline import PROFILES, Timeline
from megatron_webrl.trainer.coordinator import UpdateResult
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.learner import Metrics
from megatron_webrl.trainer.metrics.logprob_mismatch import LogprobMismatch
from megatron_webrl.trainer.metrics.system_metrics import known_peak_tflops, memory_metrics, performance_metrics
from megatron_webrl.trainer.parallel import all_reduce_max
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.types import Group
from megatron_webrl.util.atomic_file import continue_without


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
        system = self._syncer.last_transfer_metrics() | memory_metrics(device)
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
