"""Benchmark of sequence packing: accuracy of the cost model, balance of packed sequences, savings by merging.

1. Cost: forward and backward passes of packed sequences of very different lengths on a small real model, compared with
   the prediction of the cost model.
2. Packing: steps of web-agent episodes (prompts of 1 to 12 thousand tokens with one to four screenshots, responses of
   50 to 500 tokens, heavy-tailed) packed for several replicas with the costs of Qwen3-VL-4B, compared with
   first-fit-decreasing by tokens and with padding to the longest.
3. Merging: the fraction of steps that share a prefix with another one, in episodes with prompts of the rollout's
   context.

    python -m tools.bench.packing [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import platform as machine
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.model import parameter_counts
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.packing import FlopsEstimator, pack_sequences
from megatron_webrl.trainer.data.prefix_merging import MergedSequence, merge_prefixes, unique_images, unmerged_sequence
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker
from tools.arguments import make_bench_parser, write_json
from tools.bench.episodes import make_episodes
from tools.bench.screenshots import draw_page
from tools.make_tiny_model import make_tiny_model

MODEL = {
    "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 768, "vision_hidden": 256,
    "vision_layers": 4, "vision_heads": 8, "vision_intermediate": 768, "max_position_embeddings": 16384,
}  # fmt: skip
TIMED_SEQUENCES = (
    (128, 0),
    (256, 0),
    (600, 1),
    (1024, 0),
    (1200, 3),
    (2048, 0),
    (2200, 6),
    (4096, 0),
    (4200, 8),
    (8192, 0),
)
"""(tokens, images of SIDE pixels) of the timed packed sequences."""
SIDE = 512
RESPONSE_TOKENS = 64
STEPS = (1, 2, 3, 3, 4, 4, 5, 6, 8, 10, 15, 20)
"""Steps of a synthetic episode are drawn from these."""
WINDOW, SCREENSHOT_GRID = 4, (1, 48, 64)  # screenshots in a prompt; patches of one
IMAGE_TOKEN_ID, VIDEO_TOKEN_ID, MAX_PROMPT_TOKENS = 151655, 151656, 12000
REPLICAS, MAX_SEQUENCE_TOKENS = 8, 16384


def web_agent_steps(episodes: int, seed: int) -> list[TrainingSample]:
    """Steps with prompts in the form of the rollout: header, summary once the window slides, rounds."""
    made: list[TrainingSample] = []
    for number in range(episodes):
        rng = np.random.default_rng((seed, number))
        count, header = int(rng.choice(STEPS)), _random_tokens(rng, min(6000, 300 + int(200 * rng.pareto(0.9))))
        shot = np.full(SCREENSHOT_GRID[0] * SCREENSHOT_GRID[1] * SCREENSHOT_GRID[2] // 4, IMAGE_TOKEN_ID, np.int32)
        opening = [
            np.concatenate([_random_tokens(rng, min(2000, 30 + int(60 * rng.pareto(1.0)))), shot]) for _ in range(count)
        ]
        answers = [_random_tokens(rng, min(500, 50 + int(60 * rng.pareto(1.2)))) for _ in range(count)]
        for step in range(count):
            first = max(0, step - WINDOW + 1)
            summary = _random_tokens(rng, 25 * first)
            rounds = [part for i in range(first, step) for part in (opening[i], answers[i])]
            prompt = np.concatenate([header, summary, *rounds, opening[step]])
            if len(prompt) > MAX_PROMPT_TOKENS:
                break
            made.append(_step(prompt, answers[step], tuple(range(first, step + 1)), number))
    return made


def _random_tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1000, 100000, count).astype(np.int32)


def _step(prompt: np.ndarray, response: np.ndarray, shots: tuple[int, ...], episode: int) -> TrainingSample:
    return TrainingSample(
        prompt=prompt,
        response=response,
        behaviour_logprobs=np.zeros(len(response), np.float32),
        versions=np.zeros(len(response), np.int32),
        images=tuple(b"%d/%d" % (episode, shot) for shot in shots),
        grids=np.array([SCREENSHOT_GRID] * len(shots), np.int32),
        temperature=1.0,
        advantage=1.0,
        trajectory_steps=1,
        trajectory_id=(episode, 0),
    )


@dataclass(frozen=True)
class PackingResult:
    """Result of one packing method. Costs are in operations."""

    sequences: int
    utilisation: float  # real tokens / capacity
    work: float  # of all packed sequences
    replica_imbalance: float  # largest cost / mean
    sequence_imbalance: float  # largest cost / mean
    lockstep_work: float  # replicas x work if all replicas wait for each other after each packed sequence
    images: int  # encoded
    seconds: float  # of packing


def packing_result(
    chains: Sequence[MergedSequence], parts: list[list[list[int]]], cost: FlopsEstimator, seconds: float
) -> PackingResult:
    """Figures of packed sequences of `chains`, by replica; replicas may differ in their number."""
    costs = [[cost.packed_flops(*(chains[i] for i in row)) for row in part] for part in parts]
    flat, loads = [c for part in costs for c in part], [sum(part) for part in costs]
    longest = max(map(len, costs))
    columns = [max(part[i] if i < len(part) else 0.0 for part in costs) for i in range(longest)]
    return PackingResult(
        sequences=len(flat),
        utilisation=sum(chain.length for chain in chains) / (len(flat) * MAX_SEQUENCE_TOKENS),
        work=sum(flat),
        replica_imbalance=max(loads) / statistics.mean(loads),
        sequence_imbalance=max(flat) / statistics.mean(flat),
        lockstep_work=sum(columns) * len(parts),
        images=sum(len(unique_images([chains[i] for i in row])) for part in parts for row in part),
        seconds=seconds,
    )


def first_fit(chains: Sequence[MergedSequence]) -> list[list[list[int]]]:
    """Longest first into the first sequence with room; sequences in turn to the replica with the fewest tokens."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(chains)), key=lambda i: -chains[i].length):
        place = next((r for r in range(len(rows)) if room[r] >= chains[index].length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(MAX_SEQUENCE_TOKENS)
        rows[place].append(index)
        room[place] -= chains[index].length
    parts: list[list[list[int]]] = [[] for _ in range(REPLICAS)]
    loads = [0] * REPLICAS
    for row, left in zip(rows, room, strict=True):
        replica = loads.index(min(loads))
        parts[replica].append(row)
        loads[replica] += MAX_SEQUENCE_TOKENS - left
    return parts


def padded(chains: Sequence[MergedSequence], cost: FlopsEstimator) -> PackingResult:
    """Batches of samples padded to the longest one, as many as fit."""
    longest = max(chain.length for chain in chains)
    pairs = longest * (longest + 1) / 2
    each = [
        longest * cost.per_token
        + pairs * cost.per_token_pair
        + len(c.response_positions) * cost.per_scored_token
        + sum(map(cost.image_flops, c.grids.tolist()))
        for c in chains
    ]
    size = MAX_SEQUENCE_TOKENS // longest
    batches = [sum(each[i : i + size]) for i in range(0, len(each), size)]
    loads = [sum(batches[replica::REPLICAS]) for replica in range(REPLICAS)]
    columns = [max(batches[i : i + REPLICAS]) for i in range(0, len(batches), REPLICAS)]
    return PackingResult(
        sequences=len(batches),
        utilisation=sum(chain.length for chain in chains) / (len(each) * longest),
        work=sum(each),
        replica_imbalance=max(loads) / statistics.mean(loads),
        sequence_imbalance=max(batches) / statistics.mean(batches),
        lockstep_work=sum(columns) * REPLICAS,
        images=sum(len(chain.images) for chain in chains),
        seconds=0.0,
    )


def compare(episodes: int) -> tuple[dict[str, PackingResult], str]:
    """Results of all packing methods on the same steps, and a description of the steps."""
    cost = FlopsEstimator.from_hf_config(parameter_counts.make_hf_config("4B"))
    steps = web_agent_steps(episodes, seed=0)
    begun = time.perf_counter()
    merged = merge_prefixes(steps, (IMAGE_TOKEN_ID, VIDEO_TOKEN_ID))
    merging = time.perf_counter() - begun
    alone = [unmerged_sequence(step) for step in steps]
    lengths = sorted(chain.length for chain in alone)
    description = (
        f"{len(steps)} steps of {episodes} episodes, {lengths[0]} to {lengths[-1]} tokens, median "
        f"{lengths[len(lengths) // 2]}, 99 % under {lengths[len(lengths) * 99 // 100]}; {len(merged)} sequences after "
        f"merging in {merging:.2f} s; packed sequences of {MAX_SEQUENCE_TOKENS} tokens, {REPLICAS} replicas"
    )

    def timed(make: Any, chains: list[MergedSequence]) -> PackingResult:
        begun = time.perf_counter()
        parts = make(chains)
        return packing_result(chains, parts, cost, time.perf_counter() - begun)

    def balanced(chains: list[MergedSequence]) -> list[list[list[int]]]:
        return pack_sequences(chains, cost, MAX_SEQUENCE_TOKENS, REPLICAS)

    return {
        "balanced, merged": timed(balanced, merged),
        "balanced": timed(balanced, alone),
        "first fit by tokens, merged": timed(first_fit, merged),
        "first fit by tokens": timed(first_fit, alone),
        "padded to the longest": padded(alone, cost),
    }, description


@dataclass(frozen=True)
class TimedSequence:
    """Forward and backward pass of one packed sequence."""

    tokens: int
    images: int
    operations: float  # predicted, forward
    seconds: float  # fastest round; CPU time on the CPU


def time_sequences(folder: Path, rounds: int, rows: Sequence[tuple[int, int]]) -> list[TimedSequence]:
    """Time packed sequences of one sample on a small model in this process."""
    torch.set_num_threads(1)
    platform = platforms.activate("auto")
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group(platform.backend, store=store, rank=0, world_size=1)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.layout import ParallelSizes

    path = make_tiny_model(folder / "timed", **MODEL)  # type: ignore[arg-type]
    process_groups.init_process_groups(ParallelSizes())
    chunks = build_model(path, dtype="float32", platform=platform)
    load_hf(chunks, path)
    processor, cost = Processor.load(path), FlopsEstimator.from_hf_config(load_hf_config(path))
    builder = SequencePacker(processor, max(n for n, _ in rows), platform.device, 0, 1, cost)
    samples = [_sample(processor, tokens, images) for tokens, images in rows]
    batches = [builder.build([sample], "token_mean", 1)[0] for sample in samples]
    best = [float("inf")] * len(rows)
    for _ in range(rounds):
        best = [min(b, _pass(chunks[0], batch, platform)) for b, batch in zip(best, batches, strict=True)]
    torch.distributed.destroy_process_group()
    return [
        TimedSequence(batch.token_count, len(batch.inputs.grids), cost.packed_flops(unmerged_sequence(sample)), seconds)
        for batch, sample, seconds in zip(batches, samples, best, strict=True)
    ]


def _sample(processor: Processor, tokens: int, images: int) -> TrainingSample:
    rng = np.random.default_rng((tokens, images))
    shots = tuple(draw_page(i, SIDE, SIDE) for i in range(images))
    grids = processor.grids(shots)
    parts = []
    for grid in grids:
        parts += [
            np.full(int(grid.prod()) // processor.merge_size**2, processor.image_token_id),
            rng.integers(20, 300, 3),
        ]
    filling = tokens - RESPONSE_TOKENS - sum(map(len, parts))
    prompt = np.concatenate([*parts, rng.integers(20, 300, filling)]).astype(np.int32)
    zeros = np.zeros(RESPONSE_TOKENS, np.int32)
    response = rng.integers(20, 300, RESPONSE_TOKENS).astype(np.int32)
    return TrainingSample(prompt, response, zeros.astype(np.float32), zeros, shots, grids, 1.0, 1.0, 1, (0, 0))


def _pass(model: Any, batch: Microbatch, platform: platforms.Platform) -> float:
    """Seconds of one forward and backward pass."""
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    # CPU time excludes the time of other processes.
    clock = time.process_time if platform.name == "cpu" else time.perf_counter
    torch.cuda.synchronize()
    begun = clock()
    logits = model(batch.inputs)
    logprobs, _ = vocab_parallel_logprobs(logits, batch.targets, 1.0, model.unpadded_vocab_size, None)
    (logprobs * batch.weight).sum().backward()
    torch.cuda.synchronize()
    return clock() - begun


def merging(folder: Path, episodes: int) -> dict[str, float]:
    """Savings by merging for episodes with prompts of the rollout's context, windows of four screenshots."""
    processor = Processor.load(make_tiny_model(folder / "context", max_position_embeddings=16384))
    steps = [step for episode in make_episodes(processor, episodes, 16384, seed=0) for step in episode]
    video = int(processor.tokenizer.convert_tokens_to_ids("<|video_pad|>"))
    chains = merge_prefixes(steps, (processor.image_token_id, video))
    return {
        "episodes": episodes,
        "steps": len(steps),
        "steps merged into another": len(steps) - len(chains),
        "tokens": sum(step.length for step in steps),
        "tokens after merging": sum(chain.length for chain in chains),
        "images": sum(len(step.images) for step in steps),
        "images after merging": sum(len(chain.images) for chain in chains),
    }


def show_times(rows: Sequence[TimedSequence]) -> dict[str, float]:
    """Print predictions and measurements; returns their correlation, plain and of the logarithms."""
    predicted, measured = np.array([r.operations for r in rows]), np.array([r.seconds for r in rows])
    # Relative errors, so that the longest sequence does not dominate.
    rate = float(np.exp(np.mean(np.log(measured / predicted))))
    print("| tokens | images | predicted ms | measured ms | measured / predicted | measured / by tokens alone |")
    print("|" + "---:|" * 6)
    by_tokens = np.array([r.tokens for r in rows])
    by_tokens = by_tokens * np.exp(np.mean(np.log(measured / by_tokens)))
    for row, plain in zip(rows, by_tokens, strict=True):
        guess = row.operations * rate
        cells = f"{guess * 1e3:.0f} | {row.seconds * 1e3:.0f} | {row.seconds / guess:.2f} | {row.seconds / plain:.2f}"
        print(f"| {row.tokens} | {row.images} | {cells} |")
    found = {
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
        "correlation of logarithms": float(np.corrcoef(np.log(predicted), np.log(measured))[0, 1]),
        "correlation by tokens alone": float(np.corrcoef(by_tokens, measured)[0, 1]),
        "GFLOP/s, forward and backward": 3e-9 / rate,
    }
    print("; ".join(f"{name} {value:.3f}" for name, value in found.items()) + "\n")
    return found


def show_packing(found: dict[str, PackingResult], description: str) -> None:
    """Print one line per method, relative to the first."""
    ours = found["balanced, merged"]
    print(description + "\n")
    columns = (
        "sequences",
        "tokens used",
        "images encoded",
        "work",
        "replicas max/mean",
        "sequences max/mean",
        "time",
        "s to pack",
    )
    print("| packed by | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, method in found.items():
        slowest = method.work * method.replica_imbalance / (ours.work * ours.replica_imbalance)
        balance = f"{method.replica_imbalance:.3f} | {method.sequence_imbalance:.3f}"
        relative = f"{slowest:.2f} / {method.lockstep_work / ours.lockstep_work:.2f}"
        used = f"{method.sequences} | {method.utilisation:.1%} | {method.images} | {method.work / ours.work:.2f}"
        print(f"| {name} | {used} | {balance} | {relative} | {method.seconds:.2f} |")
    print("work and time relative to the first line; time: replicas wait at the end / after every packed sequence\n")


def main() -> None:
    parser = make_bench_parser(__doc__, "shorter sequences, one round, fewer episodes")
    arguments = parser.parse_args()
    rounds, episodes = (1, 64) if arguments.quick else (3, 512)
    print(f"{os.cpu_count()} CPUs, {machine.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        saved = merging(Path(temporary), episodes // 4)
        rows = time_sequences(Path(temporary), rounds, TIMED_SEQUENCES[:-3] if arguments.quick else TIMED_SEQUENCES)
    fit = show_times(rows)
    found, description = compare(episodes)
    show_packing(found, description)
    print("prompts of the rollout: " + ", ".join(f"{value} {name}" for name, value in saved.items()))
    if arguments.json:
        figures = {
            "timed sequences": [vars(row) for row in rows], "fit": fit, "merging": saved,
            "steps": description,
            "packed": {name: vars(method) for name, method in found.items()},
        }  # fmt: skip
        write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
