"""The warm start with and without image workers, and its prefetching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.trainer.warm_start import _prefetch_one
from tests.gloo import spawn
from tests.trainer import warm_start_ranks


def test_minibatches_are_built_one_step_early_and_in_order() -> None:
    built: list[int] = []

    def minibatches() -> Iterator[list[Any]]:
        for number in range(3):
            built.append(number)
            yield [number]

    assert [(rows, len(built)) for rows in _prefetch_one(minibatches())] == [([0], 2), ([1], 3), ([2], 3)]
    assert list(_prefetch_one(iter([]))) == []


def test_prefetched_images_give_bit_identical_weights(tmp_path: Path, tiny_model: Path) -> None:
    spawn(warm_start_ranks.run, str(tmp_path), str(tiny_model), ranks=1)
    alone, ahead = (torch.load(tmp_path / f"weights-{workers}.pt") for workers in (0, 1))
    assert alone.keys() == ahead.keys()
    assert all(torch.equal(tensor, ahead[name]) for name, tensor in alone.items())
