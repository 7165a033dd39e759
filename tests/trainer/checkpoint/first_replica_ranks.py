"""Rank bodies of the tests that weights are read from storage by their first replica only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_webrl.config.schema import Config
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trainer.checkpoint.small_learner import LAYOUTS, laid_out, make_learner, scramble, session

HF_LAYOUTS: dict[str, dict[str, int]] = {
    "replicas": {},
    "context": {"context_parallel": 2},
    "experts": {"expert_parallel": 2},
    "tensor": {"tensor_parallel": 2, "expert_tensor_parallel": 1},
}


def hugging_face(rank: int, folder: str, models: dict[str, str]) -> None:
    """Load each model in each layout, in which rank 1 has another folder if it has no first replica."""
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.build import load_hf
    from megatron_webrl.trainer import main
    from megatron_webrl.trainer.parallel import parallel_sizes

    torchvision_shim.install()
    platform, found = gloo.join(rank, 2, folder), {}
    for kind, model in models.items():
        for name, layout in HF_LAYOUTS.items():
            if name == "experts" and kind == "dense":
                continue
            config = _config(model, layout)
            process_groups.init_process_groups(parallel_sizes(config), seed=1)
            reads = rank == 0 or name in ("experts", "tensor")
            config.model.path = model if reads else str(_without_tensors(Path(model), Path(folder, f"{kind}-{name}")))
            learner = main.make_learner(config, main.load_model(config, platform))
            values = [parameter.detach().clone() for chunk in learner.chunks for parameter in chunk.parameters()]
            load_hf(learner.models, model)  # all of this rank's
            wanted = [parameter.detach() for chunk in learner.chunks for parameter in chunk.parameters()]
            found[kind, name] = {
                "weights": [torch.equal(one, two) for one, two in zip(values, wanted, strict=True)],
                "main": _main_weights_agree(learner),
            }
            process_groups.destroy_process_groups()
    process_groups.init_process_groups(parallel_sizes(_config(models["dense"], {})), seed=1)
    found["refused"] = _refusals(rank, Path(folder), models["dense"], platform)
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()
    torch.save(found, f"{folder}/hugging-face-{rank}.pt")


def _config(model: str, layout: dict[str, int]) -> Config:
    config = Config()
    config.model.path, config.model.dtype = model, "bfloat16"
    for key, value in layout.items():
        setattr(config.trainer, key, value)
    return config


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


def _refusals(rank: int, folder: Path, model: str, platform: Any) -> str:
    """The error of a load whose first replica lacks the tensors."""
    from megatron_webrl.model.build import LoadError
    from megatron_webrl.trainer import main

    config = _config(model, {})
    config.model.path = str(_without_tensors(Path(model), folder / "refused")) if rank == 0 else model
    try:
        main.make_learner(config, main.load_model(config, platform))
    except LoadError as error:
        return str(error)
    return "loaded"


def erase_tensors(checkpoint: Path) -> None:
    """Overwrite all tensors of a distributed checkpoint with zeros; other objects stay."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (checkpoint / place.relative_path).open("r+b") as file:
                file.seek(place.offset)
                file.write(bytes(place.length))


def megatron(rank: int, folder: str) -> None:
    """Load weights of a Megatron checkpoint of which rank 1 has tensors of zeros, in a layout without other shards."""
    from megatron.core import dist_checkpointing

    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_weights, sharded_weights

    with session(rank, folder), laid_out(LAYOUTS[0]):
        learner, other = make_learner(LAYOUTS[0]), make_learner(LAYOUTS[0])
        scramble(learner)
        target = Path(folder, "weights", "megatron")
        if rank == 0:
            target.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(sharded_weights(learner.chunks), str(target))
        own = Path(folder, f"seen-by-{rank}")
        shutil.copytree(target.parent, own)
        if rank:
            erase_tensors(own / "megatron")
        torch.distributed.barrier()
        before = [parameter.detach().clone() for parameter in other.chunks[0].parameters()]
        load_weights(own, other.chunks)
        pairs = list(zip(learner.chunks[0].parameters(), other.chunks[0].parameters(), strict=True))
        found = {
            "equal": [torch.equal(one, two) for one, two in pairs],
            "changed": [not torch.equal(one, two) for one, (_, two) in zip(before, pairs, strict=True)],
        }
    torch.save(found, f"{folder}/megatron-{rank}.pt")
