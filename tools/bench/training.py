"""Training tokens per second of the trainer's packed sequences and of transformers, one by one and padded.

All variants use the same model (random weights), samples, loss and optimiser, in one run on one machine. Each variant
has a process of its own, which gives its peak memory; one works at a time, in turns. The benchmark checks that all
losses are equal at every step. A round is one optimiser step on all samples.

    python -m tools.bench.training [--quick] [--json FILE] [--hidden 256] [--layers 6] [--episodes 16] [--rounds 3]

With --group-size N, above 1, each episode becomes a group of N trajectories with the same task and first page, and the
variants are the trainer's with each choice of trainer.merge_prefixes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from tools.arguments import make_bench_parser, write_json
from tools.bench.episodes import make_episodes
from tools.bench.learners import PREFIX_VARIANTS, VARIANTS, StepMeasurement, TrainingBenchConfig, serve
from tools.make_tiny_model import make_tiny_model

BASELINE, PREFIX_BASELINE = "transformers, padded", "steps of a trajectory merged"
SECONDS = 1800.0  # limit of a process's start and of each step
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative
HEAD_DIM = 32  # of an attention head
VOCABULARY = 4096  # most entries of the tokenizer


@dataclass(frozen=True)
class VariantResult:
    """All rounds of one variant."""

    variant: str
    rounds: tuple[StepMeasurement, ...]
    peak_bytes: int

    @property
    def median(self) -> float:
        """Median seconds of a round."""
        return statistics.median(each.seconds for each in self.rounds)

    @property
    def cpu_median(self) -> float:
        """Median CPU seconds of a round, all threads."""
        return statistics.median(each.cpu_seconds for each in self.rounds)


def measure(
    task: TrainingBenchConfig, samples: Sequence[TrainingSample], rounds: int, variants: Sequence[str]
) -> list[VariantResult]:
    """Measure variants in turns; a first, short step of each is not counted."""
    context = multiprocessing.get_context("spawn")
    started: list[tuple[Any, Connection]] = []
    try:
        for variant in variants:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, os.getpid(), variant, task), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
            _reply(ours, variant)
            _step(ours, variant, samples[:2])
            print(f"{variant}: ready", file=sys.stderr)
        taken: dict[str, list[StepMeasurement]] = {variant: [] for variant in variants}
        for number in range(rounds):
            for variant, (_, connection) in zip(variants, started, strict=True):
                taken[variant].append(_step(connection, variant, samples))
                print(f"round {number + 1}, {variant}: {taken[variant][-1].seconds:.1f} s", file=sys.stderr)
        results = []
        for variant, (_, connection) in zip(variants, started, strict=True):
            connection.send(None)
            results.append(VariantResult(variant, tuple(taken[variant]), _reply(connection, variant)))
        return results
    finally:
        for process, connection in started:
            connection.close()
            process.join(5)
            process.kill()


def _step(connection: Connection, variant: str, samples: Sequence[TrainingSample]) -> StepMeasurement:
    connection.send(samples)
    return _reply(connection, variant)


def _reply(connection: Connection, variant: str) -> Any:
    if not connection.poll(SECONDS):
        raise TimeoutError(f"{variant} did not reply within {SECONDS:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"the process of {variant!r} ended; see its output above") from None


def check_losses(results: Sequence[VariantResult], limit: float) -> float:
    """Largest relative difference of a loss from that of the first variant. Raises SystemExit beyond `limit`."""
    worst = 0.0
    for result in results[1:]:
        for number, (ours, other) in enumerate(zip(result.rounds, results[0].rounds, strict=True), 1):
            difference = abs(ours.loss - other.loss) / abs(other.loss)
            if not difference <= limit:
                losses = f"{result.variant} {ours.loss}, {results[0].variant} {other.loss}"
                raise SystemExit(f"losses differ in round {number}: {losses}")
            worst = max(worst, difference)
    return worst


def show(results: Sequence[VariantResult], samples: Sequence[TrainingSample], baseline_name: str) -> None:
    """Print the table, relative to the baseline."""
    real, answers = sum(s.length for s in samples), sum(len(s.response) for s in samples)
    baseline = next(result for result in results if result.variant == baseline_name)
    print(
        f"| | tokens/s | answer tokens/s | ratio to {'padded' if baseline_name == BASELINE else baseline_name} "
        "| ratio in CPU time | computed tokens | encoded images | s per round | CPU s | peak MiB |"
    )
    print("|---|" + "---:|" * 9)
    for result in results:
        print(
            f"| {result.variant} | {real / result.median:.0f} | {answers / result.median:.0f} "
            f"| {baseline.median / result.median:.2f} | {baseline.cpu_median / result.cpu_median:.2f} "
            f"| {result.rounds[-1].tokens} | {result.rounds[-1].images} "
            f"| {result.median:.1f} | {result.cpu_median:.1f} | {result.peak_bytes / 2**20:.0f} |"
        )


def describe(samples: Sequence[TrainingSample]) -> str:
    """A description of the samples: lengths and images."""
    sizes = np.array([(sample.length, len(sample.response), len(sample.images)) for sample in samples])
    lengths, answers, images = sizes.T
    return (
        f"{len(samples)} samples of {len({s.trajectory_id for s in samples})} episodes, {lengths.sum()} tokens "
        f"({lengths.min()} to {lengths.max()}, median {np.median(lengths):.0f}), {answers.sum()} of them answers "
        f"({answers.min()} to {answers.max()}), {images.sum()} images ({images.min()} to {images.max()} a sample)"
    )


def main() -> None:
    options = make_parser().parse_args()
    if options.quick:
        options.episodes, options.rounds = min(options.episodes, max(1, 4 // options.group_size)), 1
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as folder:
        model = make_model(Path(folder) / "model", options)
        processor = Processor.load(model)
        episodes = make_episodes(processor, options.episodes, options.window, options.seed, options.group_size)
        samples = [sample for episode in episodes for sample in episode]
        task = TrainingBenchConfig(
            str(model),
            options.dtype,
            options.platform,
            options.packed_length,
            options.padded_batch,
            options.attention,
            options.threads,
        )
        variants = VARIANTS if options.group_size == 1 else PREFIX_VARIANTS
        results = measure(task, samples, options.rounds, list(variants))
    worst = check_losses(results, LOSS_TOLERANCE[options.dtype])
    print(
        f"{describe(samples)}; hidden {options.hidden}, {options.layers} layers, packed sequences of "
        f"{options.packed_length} tokens, padded batches of {options.padded_batch}, {options.dtype}; "
        f"median of {options.rounds} rounds; {options.threads} threads, "
        f"{platform.machine()}; losses equal within {worst:.0e}\n"
    )
    show(results, samples, BASELINE if options.group_size == 1 else PREFIX_BASELINE)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "quick")}
        found = {"settings": settings, "samples": describe(samples), "results": [*map(dataclasses.asdict, results)]}
        write_json(options.json, found)


def make_model(folder: Path, options: argparse.Namespace) -> Path:
    """A model of the given size with a vision tower in the proportions of Qwen3-VL-4B."""
    heads = options.hidden // HEAD_DIM
    vision = 64 * max(1, round(options.hidden / 64 / 2.5))
    depth = math.ceil(options.layers * 2 / 3)
    return make_tiny_model(
        folder,
        hidden=options.hidden,
        layers=options.layers,
        heads=heads,
        kv_heads=heads // math.gcd(heads, 4),
        head_dim=HEAD_DIM,
        intermediate=round(options.hidden * 3.8 / 64) * 64,
        vision_hidden=vision,
        vision_layers=depth,
        vision_heads=vision // 32,
        vision_intermediate=4 * vision,
        vision_grid=48,
        deepstack=tuple(sorted({depth // 4, depth // 2, depth - 1})),
        vocabulary=VOCABULARY,
        max_position_embeddings=max(4096, options.window),
        dtype=options.dtype,
        seed=options.seed,
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_bench_parser(__doc__, "four episodes or one group, one round")
    for option, default, text in (
        ("--hidden", 256, "width of the text model, a multiple of 32"),
        ("--layers", 6, "layers of the text model"),
        ("--episodes", 16, "episodes whose steps are the samples"),
        ("--group-size", 1, "trajectories of each episode's task; above 1, choices of merge_prefixes are compared"),
        ("--window", 2048, "largest number of tokens of a sample"),
        ("--rounds", 3, "measured optimiser steps"),
        ("--packed-length", 4096, "tokens of a packed sequence"),
        ("--padded-batch", 4, "samples that transformers pads together"),
        ("--threads", len(os.sched_getaffinity(0)), "threads of each process"),
        ("--seed", 0, "of model and samples"),
    ):
        parser.add_argument(option, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--dtype", choices=tuple(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--attention", choices=("sdpa", "eager"), default="sdpa", help="transformers' implementation (default: sdpa)"
    )
    return parser


if __name__ == "__main__":
    main()
