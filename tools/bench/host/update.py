"""One update of a trainer rank: the trainer's code on a simulated device."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.processor import Processor
from megatron_webrl.placement.cost_model import StageCosts
from megatron_webrl.placement.hardware import CARDS, Rates
from megatron_webrl.placement.model_shape import ModelShape
from megatron_webrl.placement.prediction import predict_training
from megatron_webrl.ring.ring import Ring
from megatron_webrl.track.episodes import EpisodeLog
from megatron_webrl.track.metrics import episode_metrics, mean_response_tokens, rollout_seconds, step_metrics
from megatron_webrl.types import Group
from tools.bench.host.device import ImageClock, SimulatedDevice
from tools.bench.host.groups import GRID, HEIGHT, LENGTHS, WIDTH
from tools.bench.host.launches import Launches
from tools.bench.host.measures import cpu_seconds, packed_shape
from tools.bench.screenshots import draw_page
from tools.make_tiny_model import make_tiny_model

RECORD_SECONDS = 60.0
META = torch.device("meta")


@dataclass(frozen=True)
class HostResult:
    """One update of one rank. Seconds of the host are CPU seconds of its main thread."""

    host: dict[str, float]  # by part; launches aside
    launching: float
    busy: float  # predicted seconds of the device
    idle: dict[str, float]  # seconds that the device waited, by what the host did then
    image_wait: float
    worker_seconds: float  # CPU seconds of an image in a worker
    tokens: int  # of one pass over the rank's micro-batches
    microbatches: int
    images: int  # that this rank encodes
    train_seconds: float  # predicted, of a mean micro-batch
    score_seconds: float

    @property
    def waited(self) -> float:
        """The part of an update in which the device waits for the host."""
        return sum(self.idle.values()) / (self.busy + sum(self.idle.values()))


class HostBench:
    """Rank 0 of a configuration."""

    def __init__(self, folder: Path, config: Config, size: str, card: str, launches: Launches) -> None:
        from megatron_webrl.trainer.data.packing import FlopsEstimator
        from megatron_webrl.trainer.data.sequence_packer import SequencePacker
        from megatron_webrl.trainer.images import WaitTimer
        from megatron_webrl.trainer.main import make_image_prefetcher

        self.config, self.launches, trainer = config, launches, config.trainer
        config.run.directory = str(folder)
        description = parameter_counts.make_hf_config(size)
        self.model = ModelShape.from_description(description.to_dict())
        self.rates = Rates.of_card(CARDS[card])
        predicted = predict_training(config, description.to_dict(), self.rates, LENGTHS)
        steps = trainer.epochs * trainer.minibatches
        after = [predicted.parts.get(part, 0.0) for part in ("gradients and weights", "optimizer")]
        self.optimizer_seconds = sum(after) / steps
        self.processor = Processor.load(make_tiny_model(folder / "model", max_pixels=2**24))
        timer = WaitTimer()
        self.packer = SequencePacker(
            processor=self.processor,
            max_tokens=trainer.tokens_per_microbatch,
            device=META,
            data_parallel_rank=0,
            data_parallel_size=trainer.data_parallel,
            flops_estimator=FlopsEstimator.from_hf_config(description, trainer.train_vision),
            num_image_ranks=trainer.tensor_parallel * trainer.context_parallel,
            context_parallel_size=trainer.context_parallel,
            token_multiple=trainer.tensor_parallel,
            prefetcher=make_image_prefetcher(config, self.processor, META, timer),
            wait_timer=timer,
        )
        self.cut_seconds = self._worker_seconds()

    def _worker_seconds(self) -> float:
        """CPU seconds of a screenshot in an image worker."""
        cut, page = self.processor.patchifier, draw_page(0, WIDTH, HEIGHT)
        out = np.empty(cut.image_bytes(GRID), np.uint8)
        return cpu_seconds(lambda: cut.patchify(page, GRID, out))

    def close(self) -> None:
        """Stop the image workers."""
        self.packer.close()

    def run(self, ring: Ring, groups: int) -> HostResult:
        """One update on `groups` that wait in the ring."""
        return _Update(self, ring, groups).run()


class _Update:
    def __init__(self, bench: HostBench, ring: Ring, groups: int) -> None:
        from megatron_webrl.trainer.accounting import Accounting
        from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
        from megatron_webrl.trainer.data.group_source import GroupSource

        self.bench, self.count, self.config = bench, groups, bench.config
        log = EpisodeLog(bench.config.run_folder, 0, 0, lambda: None)
        self.source = GroupSource(ring, self.config, ResumePoint(), Accounting(), episode_log=log)
        self.seconds: dict[str, float] = defaultdict(float)
        self.launching = self.image_wait = 0.0
        self.scores = False  # whether a pass computes log-probabilities first
        self.device = SimulatedDevice()
        self.images = ImageClock(self.device, self.config.trainer.image_workers, bench.cut_seconds)

    def run(self) -> HostResult:
        with self._part("groups"):
            selected = self.source.wait_for_groups(0, self.count, RECORD_SECONDS, lambda ready: True)
            assert selected is not None
            groups = [group for group, _ in selected]
        with self._host_code():
            minibatches = self._pack(groups)
            scores, trains = self._compute(minibatches)
        with self._part("metrics, accounting"):
            self._close(groups, {group.ticket: numbers for group, numbers in selected})
        self.device.end("metrics, accounting")
        batches = [each for minibatch in minibatches for each in minibatch]
        return HostResult(
            host=dict(self.seconds),
            launching=self.launching,
            busy=self.device.busy,
            idle={name: seconds for name, seconds in self.device.idle.items() if seconds},
            image_wait=self.image_wait,
            worker_seconds=self.bench.cut_seconds,
            tokens=sum(each.token_count for each in batches),
            microbatches=len(batches),
            images=len(self.images.ready),
            train_seconds=statistics.mean(trains),
            score_seconds=statistics.mean(scores) if scores else 0.0,
        )

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - begun

    @contextmanager
    def _host_code(self) -> Iterator[None]:
        """Copies to the device are copies to page-locked memory; the parts of packing are timed."""
        from megatron_webrl.trainer import images as image_module
        from megatron_webrl.trainer.data import sequence_packer

        def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
            return values.clone().to(device)

        with ExitStack() as stack:
            for module in (sequence_packer, image_module):
                stack.enter_context(mock.patch.object(module, "copy_to_device", upload))
            schedule = image_module.ImagePrefetcher.schedule

            def scheduled(prefetcher: Any, images: Sequence[tuple[bytes, Any]], *rest: Any) -> Any:
                self.images.schedule([data for data, _ in images])
                return schedule(prefetcher, images, *rest)

            stack.enter_context(mock.patch.object(image_module.ImagePrefetcher, "schedule", scheduled))
            self._time(stack, sequence_packer.SequencePacker, "_plan", "plan")
            self._time(stack, sequence_packer.SequencePacker, "_microbatch", "tensors")
            yield

    def _time(self, stack: ExitStack, owner: type, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._part(part):
                return function(*args, **kwargs)

        stack.enter_context(mock.patch.object(owner, name, timed))

    def _pack(self, groups: Sequence[Group]) -> list[list[Any]]:
        from megatron_webrl.trainer.data import batching

        settings = self.config.trainer
        with self._part("samples"):
            samples = batching.training_samples(groups, self.config, 0)
            parts = batching.minibatches(samples, settings.minibatches, 0)
        several = settings.epochs * len(parts) > 1
        self.scores = settings.critic is not None or (several and settings.loss.name != "raft")
        normalizer = settings.loss.normalizer, settings.loss.normalizer_constant
        return self.bench.packer.build_all(parts, *normalizer, settings.epochs + self.scores)

    def _compute(self, minibatches: Sequence[Sequence[Any]]) -> tuple[list[float], list[float]]:
        """All passes and optimizer steps, in the order of `trainer.loop.train_batch`.

        Returns predicted seconds of each forward pass, and of each forward and backward pass.
        """
        launches = self.bench.launches
        scores, trains = list[float](), list[float]()
        for batches in minibatches:
            scores += [self._pass(batch, False, launches.score) for batch in batches if self.scores]
        for _ in range(self.config.trainer.epochs):
            for batches in minibatches:
                trains += [self._pass(batch, True, launches.train) for batch in batches]
                self.device.synchronize()  # the metrics of a step, and the norm of its gradient
                self._launch(self.bench.optimizer_seconds, launches.optimizer, "optimizer")
        self.device.synchronize()
        return scores, trains

    def _pass(self, batch: Any, training: bool, operations: float) -> float:
        bench = self.bench
        pixels = batch.inputs.pixels
        if callable(pixels):
            self.image_wait += self.images.wait([image.data for image in pixels.images])
            with self._part("pixels"):
                pixels()
        with self.device.paused():
            shape = packed_shape(batch.inputs)
            seconds = StageCosts(self.config, bench.model, bench.rates, shape, 0).seconds(training).total
        self._launch(seconds, operations, "between micro-batches" if self.launching else "groups, packing")
        return seconds

    def _launch(self, seconds: float, operations: float, part: str) -> None:
        self.device.launch(seconds, operations, self.bench.launches.seconds, part)
        self.launching += operations * self.bench.launches.seconds

    def _close(self, groups: Sequence[Group], sequences: dict[int, list[int]]) -> None:
        """The figures of an update and the accounting of its episodes."""
        from megatron_webrl.trainer.metrics.group_statistics import credit_metrics

        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rollout_seconds(trajectories)
        mean_response_tokens([step for trajectory in trajectories for step in trajectory.steps])
        form = self.config.rollout.context.response_format
        episode_metrics(groups) | step_metrics(groups, form.startswith("memory_"))
        credit_metrics(groups, self.config.trainer.advantage)
        self.source.pop_metrics()
        for group in groups:
            self.source.close_group(group, sequences[group.ticket])
