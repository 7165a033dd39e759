"""Weights are read from storage by the first of their replicas, and the others have the same bits, in order."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.model.build import LoadError, load_hf
from megatron_webrl.model.vision_language import experts
from megatron_webrl.trainer import main
from tests.trainer.ranks import process_groups, results

CASES: list[tuple[str, dict[str, int], bool]] = [
    ("dense", {}, False),
    ("dense", {"tensor_parallel": 2, "expert_tensor_parallel": 1}, True),
    ("sparse", {"context_parallel": 2}, False),
    ("sparse", {"expert_parallel": 2}, True),
]
"""A model, a layout, and whether rank 1 has first replicas in it."""


SIDES = ("linear_fc1", "linear_fc2")


def hugging_face(platform: Any, folder: Path, models: dict[str, Path]) -> list[dict[str, list[bool]]]:
    """Load the model in each case; rank 1 has a folder without tensors if it has no first replica."""
    rank, found = torch.distributed.get_rank(), []
    for number, (kind, layout, reads) in enumerate(CASES):
        config = Config()
        config.model.path, config.model.dtype = str(models[kind]), "bfloat16"
        for key, value in layout.items():
            setattr(config.trainer, key, value)
        with process_groups(config):
            if rank and not reads:
                config.model.path = str(_without_tensors(models[kind], folder / str(number)))
            learner = main.make_learner(config, main.load_model(config, platform))
            parameters = [parameter for chunk in learner.chunks for parameter in chunk.parameters()]
            values = [parameter.detach().clone() for parameter in parameters]
            load_hf(learner.models, str(models[kind]))  # all of this rank's
            agree = [torch.equal(one, two) for one, two in zip(values, parameters, strict=True)]
            found.append({"weights": agree, "main": _main_weights_agree(learner)})
            if kind == "sparse":
                found[-1]["experts"] = _experts_lie_in_order(learner)
    config.model.path = str(_without_tensors(models["dense"], folder / "refused") if rank == 0 else models["dense"])
    config.trainer.expert_parallel = 1
    with process_groups(config), pytest.raises(LoadError, match=r"refused holds neither model\.safetensors nor "):
        main.load_model(config, platform)
    return found


def _without_tensors(model: Path, target: Path) -> Path:
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    return target


def _main_weights_agree(learner: Any) -> list[bool]:
    """Whether each float32 main weight of this rank's shard is that of the model."""
    agree = []
    for part in learner.optimizer.parts:
        for models, mains in zip(part.shard_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            agree += [torch.equal(one.float(), two.detach()) for one, two in zip(models, mains, strict=True)]
    return agree


def _experts_lie_in_order(learner: Any) -> list[bool]:
    """Whether the weights of each layer's experts can be taken together without a copy."""
    layers = [m for chunk in learner.models for m in chunk.modules() if isinstance(m, experts.Experts)]
    sides = [[getattr(each, side).weight for each in m.local_experts] for m in layers for side in SIDES]
    return [experts._stacked(weights).data_ptr() == weights[0].data_ptr() for weights in sides]


def test_a_rank_without_a_first_replica_needs_no_hugging_face_tensors(
    tmp_path: Path, tiny_model: Path, tiny_sparse_model: Path
) -> None:
    for rank in results(hugging_face, tmp_path, {"dense": tiny_model, "sparse": tiny_sparse_model}):
        for case, found in zip(CASES, rank, strict=True):
            for name, values in found.items():
                assert values, case
                assert all(values), (case, name, values)
