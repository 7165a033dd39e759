"""Balance of packed sequences, compared with first fit by tokens and with padding to the longest.

Steps of web-agent episodes (prompts of 1 to 12 thousand tokens with one to four screenshots, responses of 50 to 500
tokens, heavy-tailed) are packed for several replicas with the costs of Qwen3-VL-4B.

    python -m tools.bench.packing [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import platform as machine
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_webrl.model import parameter_counts
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.packing import FlopsEstimator, pack_sequences
from megatron_webrl.trainer.data.prefix_merging import MergedSequence, merge_prefixes, unique_images, unmerged_sequence
from tools.arguments import make_bench_parser, write_json

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


def show_packing(found: dict[str, PackingResult], description: str) -> None:
    """Print one line per method, relative to the first."""
    ours = found["balanced, merged"]
    print(description + "\n")
    columns = ["sequences", "tokens used", "images encoded", "work"]
    columns += ["replicas max/mean", "sequences max/mean", "time", "s to pack"]
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
    arguments = make_bench_parser(__doc__, "fewer episodes").parse_args()
    print(f"{os.cpu_count()} CPUs, {machine.machine()}, load {os.getloadavg()[0]:.1f}\n")
    found, description = compare(64 if arguments.quick else 512)
    show_packing(found, description)
    write_json(arguments.json, {"steps": description, "packed": {name: vars(each) for name, each in found.items()}})


if __name__ == "__main__":
    main()
