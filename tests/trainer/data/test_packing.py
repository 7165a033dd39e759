"""Packed sequences: complete, within the limit, balanced, full; equal on every rank."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.trainer.data.packing import FlopsEstimator, pack_sequences
from megatron_webrl.trainer.data.prefix_merging import MergedSequence, unmerged_sequence
from tests.trainer.growing_prompts import step

COST = FlopsEstimator(
    per_token=3e9, per_token_pair=2e5, per_scored_token=6e8, per_patch=1e9, per_patch_pair=1e5
)  # similar to the 2B model
LENGTHS = st.lists(st.integers(2, 500), min_size=1, max_size=60)


def chain(length: int, temperature: float = 1.0, images: tuple[bytes, ...] = (), grid: int = 16) -> MergedSequence:
    prompt, response = np.split(np.zeros(length, np.int32), [length - max(1, length // 30)])
    grids = np.array([[1, grid, grid]] * len(images), np.int32).reshape(-1, 3)
    return unmerged_sequence(step(prompt, response, images=images, grids=grids, temperature=temperature))


def web_agent_chains(count: int, seed: int = 0) -> list[MergedSequence]:
    """Steps of one to twelve thousand tokens, many short and few long, with one to four screenshots of 640 tokens."""
    rng = random.Random(seed)
    chains = []
    for number in range(count):
        length = min(12000, round(1000 * rng.paretovariate(0.9)))
        shots = min(4, length // 900)
        chains.append(chain(length + 640, images=tuple(b"%d/%d" % (number, i) for i in range(shots)), grid=50))
    return chains


def costs(chains: list[MergedSequence], rows: list[list[int]]) -> list[float]:
    return [COST.packed_flops(*(chains[i] for i in row)) for row in rows]


@given(LENGTHS, st.integers(500, 2000), st.integers(1, 4), st.integers(1, 3))
def test_only_too_few_sequences_leave_a_microbatch_empty(
    lengths: list[int], limit: int, replicas: int, multiple: int
) -> None:
    parts, unit = pack_sequences([*map(chain, lengths)], COST, limit, replicas, multiple), replicas * multiple
    rows = [row for part in parts for row in part]
    if [] in rows:
        assert len(lengths) < len(rows) == math.ceil(len(lengths) / unit) * unit
        assert all(len(row) <= 1 for row in rows)


def test_a_sequence_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"600 tokens exceeds trainer\.tokens_per_microbatch=500; set it to at least"):
        pack_sequences([chain(10), chain(600)], COST, 500)


def test_a_realistic_mix_is_packed_full_and_replicas_are_balanced() -> None:
    chains = web_agent_chains(2000)
    for limit, replicas, multiple in ((16384, 1, 1), (16384, 8, 2), (32768, 8, 1)):
        parts = pack_sequences(chains, COST, limit, replicas, multiple)
        assert sum(c.length for c in chains) >= 0.95 * limit * sum(map(len, parts)), (limit, replicas)
        loads = [sum(costs(chains, part)) for part in parts]
        assert max(loads) <= 1.01 * sum(loads) / replicas, (limit, replicas)


def test_sequences_that_share_large_images_are_packed_together() -> None:
    chains = [chain(600, images=(b"%d" % (number // 4),), grid=64) for number in range(64)]
    mixed = random.Random(0).sample(chains, 64)
    rows = pack_sequences(mixed, COST, 4800)[0]
    assert len(rows) == 8
    encoded = sum(len({mixed[i].images for i in row}) for row in rows)
    assert encoded <= 20  # of 16 images; 64 one by one


def test_replicas_compute_equal_costs_at_the_same_time() -> None:
    chains = web_agent_chains(400)
    parts = pack_sequences(chains, COST, 16384, 4)
    columns = zip(*(costs(chains, part) for part in parts), strict=True)
    assert all(max(column) <= 1.25 * min(column) for column in columns)
    assert pack_sequences(web_agent_chains(400), COST, 16384, 4) == parts  # every rank packs alone
