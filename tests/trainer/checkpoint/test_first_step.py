"""A checkpoint before the first optimizer step, when Adam has no moments yet."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gloo import spawn
from tests.trainer.checkpoint import first_step_ranks


def test_a_checkpoint_before_the_first_step_loads_and_training_continues_alike(tmp_path: Path) -> None:
    spawn(first_step_ranks.run, str(tmp_path), seconds=300)
    kinds = {"torch": {"AdamW"}, "auto": {"FusedAdam"}}
    for rank in (0, 1):
        for implementation, found in torch.load(tmp_path / f"first-step-{rank}.pt").items():
            assert found["kinds"] == kinds[implementation]
            assert found["unchanged"]
            assert found["moments"], implementation
            assert not any(found["moments"])
            assert found["counts"] == [0, 0, 2, 2]
            assert found["trained"]
            assert all(found["equal"]), implementation
