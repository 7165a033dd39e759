"""Checkpoints with trainer.checkpoint.optimizer_shards=ranks, on two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gloo import spawn
from tests.trainer.checkpoint import shard_ranks
from tests.trainer.checkpoint.small_learner import LAYOUTS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shards")
    spawn(shard_ranks.shards_of_ranks, str(folder), seconds=300)
    return torch.load(folder / "shards-0.pt", weights_only=False)


@pytest.mark.parametrize("name", [layout.name for layout in LAYOUTS])
def test_training_resumes_bit_for_bit_from_the_parts_of_the_ranks(found: dict[str, Any], name: str) -> None:
    straight, resumed, saved = found[name]
    assert straight.keys() == resumed.keys()
    assert not [key for key, tensor in straight.items() if not torch.equal(tensor, resumed[key])]
    assert any(key.startswith("optimizer.part0.optimizer.distributed.") for key in saved)
    assert not any(key.startswith("optimizer.state.") for key in saved)


def test_another_model_parallel_layout_is_refused(found: dict[str, Any]) -> None:
    assert "was saved with trainer.checkpoint.optimizer_shards=ranks and tensor size 1, not 2" in found["refused"]
