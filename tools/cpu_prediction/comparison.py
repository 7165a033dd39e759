"""A predicted optimizer step of tools/bench/training.py beside the measured one, part by part.

All seconds are CPU seconds of one thread, which other processes change less than the wall clock. A round measures the
rates and then the step, so that a busy machine slows both.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.placement.performance.shapes import ModelShape
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.util import torchvision_shim
from tools.bench import training
from tools.bench.episodes import make_episodes
from tools.bench.learners import PackedLearner, TrainingBenchConfig
from tools.cpu_prediction.rates import (
    CpuRates,
    cpu_seconds,
    in_process,
    measure_rates,
    packed_shape,
    predict_optimizer,
    predict_passes,
)
from tools.cpu_prediction.step_parts import OperationTimer

SETTINGS = ["--layers", "3", "--episodes", "2", "--threads", "1"]  # of the benchmark
ROUNDS = 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST_BLOCK = -1, -3, 2**25  # of glibc's mallopt


@dataclass(frozen=True)
class PartSeconds:
    """CPU seconds of one part of a step."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class CpuComparison:
    """Medians of all rounds."""

    rates: CpuRates
    parts: dict[str, PartSeconds]
    steps: tuple[float, ...]  # CPU seconds of the whole step in each round
    tokens: int
    operations: int  # of PyTorch in the passes of a step

    @property
    def total(self) -> PartSeconds:
        """The whole step."""
        return PartSeconds(sum(each.predicted for each in self.parts.values()), statistics.median(self.steps))


def compare_with_benchmark(settings: Sequence[str] = SETTINGS, rounds: int = ROUNDS) -> CpuComparison:
    """Measure and predict a step of the benchmark's packed variant, in a process of its own."""
    found: CpuComparison = in_process(_compare, settings, rounds)
    return found


def _compare(settings: Sequence[str], rounds: int) -> CpuComparison:
    torchvision_shim.install()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _keep_freed_memory()
    options = training.make_parser().parse_args(settings)
    with tempfile.TemporaryDirectory(prefix="webrl-predict-") as folder:
        path = training.make_model(Path(folder) / "model", options)
        task = TrainingBenchConfig(
            str(path), options.dtype, "cpu", options.packed_length, options.padded_batch, options.attention,
            options.threads,
        )  # fmt: skip
        processor = Processor.load(path)
        episodes = make_episodes(processor, options.episodes, options.window, options.seed)
        bench = _Bench(task, processor, [sample for episode in episodes for sample in episode])
        model = ModelShape.from_description(read_model_config(str(path)))
        found = [bench.measure_round(model) for _ in range(rounds)]
    return CpuComparison(
        rates=CpuRates.median([each.rates for each in found]),
        parts={
            name: PartSeconds(
                statistics.median(each.predicted[name] for each in found),
                statistics.median(each.measured[name] for each in found),
            )
            for name in found[0].measured
        },
        steps=tuple(each.step for each in found),
        tokens=bench.tokens,
        operations=found[-1].operations,
    )


def _keep_freed_memory() -> None:
    """Let glibc return no memory to the kernel, as PyTorch's allocator on a card does: its pages would fault again."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@dataclass(frozen=True)
class _Round:
    rates: CpuRates
    predicted: dict[str, float]
    measured: dict[str, float]
    step: float
    operations: int


class _Bench:
    """The packed variant in this process."""

    def __init__(self, task: TrainingBenchConfig, processor: Processor, samples: Sequence[TrainingSample]) -> None:
        from megatron_webrl.model.vision_language.attention import PackedAttention
        from megatron_webrl.trainer.loss.objective import negative_log_likelihood

        self.processor, self.samples = processor, samples
        packed = PackedLearner(task)
        self.learner, self.packer, self.loss = packed.learner, packed.builder, negative_log_likelihood
        model = self.learner.models[0]
        modules = {each: "attention" for each in model.modules() if isinstance(each, PackedAttention)}
        self.timer = OperationTimer({model.visual: "vision", model.output_layer: "output layer"} | modules, model)
        batches = self._pack()
        self.tokens = sum(each.token_count for each in batches)
        self.learner.train_step(batches, None, self.loss)  # Adam allocates its moments

    def measure_round(self, model: ModelShape) -> _Round:
        """Rates, then a step as it is, then the operations of the same passes one by one."""
        inputs = [batch.inputs for batch in self._pack()]
        rates = measure_rates(model, training.HEAD_DIM, inputs[0])
        images = list({image: None for sample in self.samples for image in sample.images})
        decoding = cpu_seconds(lambda: self.processor.pixels(images))
        begun = time.process_time()
        batches = self._pack()
        packed_at = time.process_time()
        self._passes(batches)
        computed_at = time.process_time()
        self.learner.optimizer.step()
        ended_at = time.process_time()
        self.timer.seconds.clear()
        self.timer.operations = 0
        with self.timer.passes():
            self._passes(batches)
        measured = dict(self.timer.seconds)
        measured["between operations"] = computed_at - packed_at - sum(measured.values())
        measured |= {"optimizer": ended_at - computed_at, "packing, images": packed_at - begun}
        predicted = predict_passes(model, rates, [packed_shape(each) for each in inputs], self.timer.operations)
        parameters = list(self.learner.models[0].parameters())
        predicted["optimizer"] = predict_optimizer(parameters, self.learner.optimizer.clip_norm, rates)
        predicted["packing, images"] = decoding
        return _Round(rates, predicted, measured, ended_at - begun, self.timer.operations)

    def _pack(self) -> list[Any]:
        return self.packer.build(self.samples, "token_mean", 1)

    def _passes(self, batches: Sequence[Any]) -> None:
        self.learner.forward_backward(batches, None, self.loss)
