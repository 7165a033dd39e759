"""What the loop measures of an update: spans of the timeline, durations, speed and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.track.metrics import UpdateSeconds, rollout_seconds
from megatron_webrl.track.timeline import Timeline
from megatron_webrl.trainer.coordinator import UpdateResult
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.learner import Metrics
from megatron_webrl.trainer.metrics.logprob_mismatch import LogprobMismatch
from megatron_webrl.trainer.metrics.system_metrics import known_peak_tflops, memory_metrics, performance_metrics
from megatron_webrl.trainer.parallel import all_reduce_max
from megatron_webrl.trainer.profile import profiled
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.types import Group


class Telemetry:
    """Per update: `waiting`, `training`, then `finish_update`, which is collective; `span` for other parts."""

    def __init__(self, config: Config, timeline: Timeline, packer: SequencePacker, syncer: WeightSyncer) -> None:
        self._config, self._packer, self._syncer = config, packer, syncer
        self._timeline, self.span = timeline, timeline.span
        self._started = time.monotonic()  # of the update, at the end of the one before
        self._wait_seconds = self._train_seconds = 0.0

    @contextmanager
    def waiting(self, version: int) -> Iterator[None]:
        """The trainer waits for the groups of the update that makes `version`."""
        with self.span("wait for groups", version=version) as span:
            yield
        self._wait_seconds = span.seconds

    @contextmanager
    def training(self, version: int) -> Iterator[None]:
        """The trainer makes `version`; profiled if trainer.profile_updates says so."""
        rank = torch.distributed.get_rank()
        with profiled(self._config, rank, version, self._timeline), self.span("train", version=version) as span:
            yield
        self._train_seconds = span.seconds

    def finish_update(
        self, version: int, groups: Sequence[Group], metrics: Metrics, mismatch: LogprobMismatch, sync_seconds: float
    ) -> UpdateResult:
        """The update that made `version`, with its durations and system metrics. Collective."""
        train_seconds, device = self._train_seconds, self._packer.device
        image_wait = all_reduce_max(self._packer.wait_timer.pop_seconds(), device)
        rollout = rollout_seconds([t for group in groups for t in group.trajectories])
        peak, ranks = known_peak_tflops(device, self._config.model.dtype), torch.distributed.get_world_size()
        system = self._syncer.last_transfer_metrics() | memory_metrics(device)
        system |= performance_metrics(metrics["tokens"], metrics["operations"], train_seconds, ranks, peak)
        finished = time.monotonic()
        tickets = [(group.trajectories[0].restart_epoch, group.ticket) for group in groups]
        self._timeline.record("update", self._started, finished, version=version, tickets=tickets)
        self._started = finished
        seconds = UpdateSeconds(rollout, train_seconds, sync_seconds, self._wait_seconds, image_wait)
        return UpdateResult(version, groups, metrics, mismatch, seconds, system)
