"""Rates of this CPU from small products, and what they predict of the training benchmark (tools/bench/training.py)."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.cluster.performance.rates import Rates
from megatron_webrl.cluster.performance.shapes import MicrobatchShape, ModelShape
from megatron_webrl.cluster.performance.training import stage_seconds
from megatron_webrl.config.schema import Config
from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.system import torchvision_shim
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.flops import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from tools.bench import training
from tools.bench.episodes import make_episodes
from tools.bench.learners import TrainingBenchConfig

VARIANT = "packed sequences, Megatron"
REPEATS = 5
SETTINGS = ["--layers", "3", "--episodes", "2", "--rounds", "3", "--threads", "1"]  # of the benchmark


@dataclass(frozen=True)
class CpuComparison:
    """CPU seconds of an optimizer step: predicted by part, and measured."""

    rates: dict[str, float]  # operations, and bytes of memory, per CPU second
    parts: dict[str, float]
    measured: tuple[float, ...]  # of each round
    tokens: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return sum(self.parts.values()) / statistics.median(self.measured)


def compare_with_benchmark() -> CpuComparison:
    """Run the benchmark's packed variant with SETTINGS, and predict its step from the rates of this CPU.

    All seconds are CPU seconds of one thread, which other processes change less than the wall clock.
    """
    torchvision_shim.install()
    torch.set_num_threads(1)
    options = training.make_parser().parse_args(SETTINGS)
    with tempfile.TemporaryDirectory(prefix="webrl-predict-") as folder:
        path = training.make_model(Path(folder) / "model", options)
        processor = Processor.load(path)
        episodes = make_episodes(processor, options.episodes, options.window, options.seed)
        samples = [sample for episode in episodes for sample in episode]
        task = TrainingBenchConfig(
            str(path), options.dtype, "cpu", options.packed_length, options.padded_batch, options.attention,
            options.threads,
        )  # fmt: skip
        inputs = pack(processor, path, samples, options.packed_length)
        model = ModelShape.from_description(read_model_config(str(path)))
        rates = measure_rates(model, inputs)
        parts = predict_step_seconds(model, rates, inputs)
        parts["images decoded"] = _decoding_seconds(processor, samples)
        [result] = training.measure(task, samples, options.rounds, [VARIANT])
    named = {name: getattr(rates, name) for name in ("products", "attention", "vision_attention", "memory")}
    return CpuComparison(named, parts, result.cpu_seconds, result.tokens)


def pack(processor: Processor, path: Path, samples: Sequence[TrainingSample], length: int) -> list[PackedInput]:
    """The micro-batches of `samples` as the trainer packs them."""
    cost = FlopsEstimator.from_hf_config(load_hf_config(path))
    packer = SequencePacker(processor, length, torch.device("cpu"), 0, 1, cost)
    return [batch.inputs for batch in packer.build(samples, "token_mean", 1)]


def packed_shape(packed: PackedInput) -> MicrobatchShape:
    """The shape of a micro-batch whose sequences may branch: a segment's tokens attend to those of its ancestors."""
    starts, parents = packed.cu_seqlens.tolist(), packed.parents.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    before: list[int] = []  # tokens of the ancestors of each segment; parents come first
    for parent in parents:
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
    alone = MicrobatchShape.of_sequences(lengths, len(packed.scored_positions), packed.grids.tolist())
    pairs = sum(length * earlier for length, earlier in zip(lengths, before, strict=True))
    return dataclasses.replace(alone, pairs=alone.pairs + pairs)


def measure_rates(model: ModelShape, inputs: Sequence[PackedInput]) -> Rates:
    """Rates of one thread: products, attention and element-wise kernels of the shapes of `model`, forward passes."""
    text = model.text
    tokens = max(len(each.tokens) for each in inputs)
    segments = [length for each in inputs for length in each.cu_seqlens.diff().tolist()]
    patches = int(statistics.median([grid[1] * grid[2] for each in inputs for grid in each.grids.tolist()]))
    hidden = torch.randn(tokens, text.hidden_size)
    weight = torch.randn(text.intermediate_size, text.hidden_size)
    wide = torch.randn(tokens, text.intermediate_size)
    products = 2 * tokens * weight.numel() / _cpu_seconds(lambda: torch.nn.functional.linear(hidden, weight))
    length = int(statistics.median(segments))
    attention = 2 * length * (length + 1) * text.query_width / _attention_seconds(length, text.query_width, causal=True)
    width = model.vision_hidden
    vision = 4 * patches**2 * width / _attention_seconds(patches, width, causal=False)
    memory = 12 * wide.numel() / _cpu_seconds(lambda: wide * wide)  # reads twice, writes once
    return dataclasses.replace(Rates.of_processor(products, attention, memory), vision_attention=vision)


def _attention_seconds(length: int, width: int, causal: bool) -> float:
    heads = torch.randn(1, width // training.HEAD_DIM, length, training.HEAD_DIM)
    attend = torch.nn.functional.scaled_dot_product_attention
    return _cpu_seconds(lambda: attend(heads, heads, heads, is_causal=causal))


def predict_step_seconds(model: ModelShape, rates: Rates, inputs: Sequence[PackedInput]) -> dict[str, float]:
    """CPU seconds of an optimizer step by part, without decoding its images."""
    config = Config()  # one rank on the CPU in float32
    passes = [stage_seconds(config, model, rates, packed_shape(each), 0, training=True) for each in inputs]
    parts = {name: sum(one.compute[name] for one in passes) for name in passes[0].compute}
    # Adam and clipping: gradient, weight and two moments read, all but the gradient written, the norm and the zeros.
    parts["optimizer"] = 4 * 11 * model.counts.total / rates.memory
    return {name: seconds for name, seconds in parts.items() if seconds}


def _decoding_seconds(processor: Processor, samples: Sequence[TrainingSample]) -> float:
    """Seconds to decode and cut the distinct images, as measured."""
    images = list({image: None for sample in samples for image in sample.images})
    return _cpu_seconds(lambda: processor.pixels(images))


def _cpu_seconds(work: Callable[[], Any]) -> float:
    """Median CPU seconds of a few calls, after one that is not counted."""
    work()
    taken = []
    for _ in range(REPEATS):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)
