"""Weights are read from storage by the first of their replicas, and the others have the same bits."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gloo import spawn
from tests.trainer.checkpoint import first_replica_ranks


def test_a_rank_without_a_first_replica_needs_no_hugging_face_tensors(
    tmp_path: Path, tiny_model: Path, tiny_sparse_model: Path
) -> None:
    models = {"dense": str(tiny_model), "sparse": str(tiny_sparse_model)}
    spawn(first_replica_ranks.hugging_face, str(tmp_path), models, seconds=300)
    ranks = [torch.load(tmp_path / f"hugging-face-{rank}.pt") for rank in (0, 1)]
    for found in ranks:
        refused = found.pop("refused")
        assert refused.endswith("refused holds neither model.safetensors nor model.safetensors.index.json")
        for case, agreement in found.items():
            for name, values in agreement.items():
                assert values, case
                assert all(values), (case, name, values)
    assert ranks[0].keys() == ranks[1].keys()
    assert len(ranks[0]) == 7


def test_a_rank_without_a_first_replica_reads_no_tensor_of_a_megatron_checkpoint(tmp_path: Path) -> None:
    spawn(first_replica_ranks.megatron, str(tmp_path), seconds=300)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"megatron-{rank}.pt")
        assert all(found["changed"])
        assert all(found["equal"])
