"""The two gloo processes of the conversion tests; the first writes the models' tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.config.trainer import CheckpointConfig
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.util import torchvision_shim
from tests.gloo import join

LAYOUTS: dict[str, tuple[ParallelSizes, list[str]]] = {
    "tensor": (ParallelSizes(tensor=2), ["dense"]),
    "pipeline": (ParallelSizes(pipeline=2), ["hybrid"]),
    "virtual": (ParallelSizes(pipeline=2, virtual=2), ["tied"]),
    "expert": (ParallelSizes(expert=2), ["moe"]),
    "expert tensor": (ParallelSizes(tensor=2, expert_tensor=2), ["hybrid moe"]),
}
TRAINED = ("dense", "hybrid moe")
VERSION = 5


def run(rank: int, folder: str) -> None:
    """Build models in every layout, fill them from their folder and their checkpoint, and save each once."""
    platform = join(rank, 2, folder)
    # Megatron is imported on the platform that is in use.
    from megatron_webrl.model import process_groups

    found = {}
    for layout, (sizes, names) in LAYOUTS.items():
        process_groups.init_process_groups(sizes)
        for name in names:
            found[layout, name] = _examine(Path(folder), name, layout, platform)
        process_groups.destroy_process_groups()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def _examine(folder: Path, name: str, layout: str, platform: platforms.Platform) -> list[dict[str, torch.Tensor]]:
    """Hugging Face tensors of the model after loading from each source."""
    from megatron.core import dist_checkpointing

    from megatron_webrl.model.build import build_model, load_hf

    chunks = build_model(folder / name, dtype="float32", platform=platform)
    _fill_with_nan(chunks)
    load_hf(chunks, folder / name)
    found = [_tensors(chunks)]
    saved = folder / f"{name}-{layout}" / "megatron"
    if torch.distributed.get_rank() == 0:
        saved.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_state(chunks), str(saved))
    _fill_with_nan(chunks)
    loaded = dist_checkpointing.load(_state(chunks), str(folder / f"{name}-converted/megatron"), strict="raise_all")
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    return [*found, _tensors(chunks)]


def _state(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def _fill_with_nan(chunks: list[Any]) -> None:
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)


def _tensors(chunks: list[Any]) -> dict[str, torch.Tensor]:
    from tests.model.hf_export import hf_tensors

    return {name: tensor.clone() for name, tensor in hf_tensors(chunks)}


def train(rank: int, folder: str) -> None:
    """In one process: an optimiser step on each model, a trainer's checkpoint and its weights."""
    torchvision_shim.install()
    platform = join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
    from megatron_webrl.trainer.main import load_model, make_learner

    for name in TRAINED:
        process_groups.init_process_groups(ParallelSizes(), seed=1)
        target, model, config = Path(folder, "trained", name), Path(folder, name), Config()
        target.mkdir(parents=True)
        config.model.path = str(model)
        config.trainer.tensor_parallel = config.trainer.data_parallel = 1
        learner = make_learner(config, load_model(config, platform))
        for chunk in learner.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(torch.sin(37 * parameter.detach().float()))
        learner.optimizer.step()
        checkpoints = Checkpointer(target / "checkpoints", model, CheckpointConfig())
        checkpoints.start_save(learner, TrainerState(VERSION, 0, 4, (5,), {"trained": 8}, 1))
        checkpoints.close()
        assert checkpoints.last_error is None, checkpoints.last_error
        torch.save(_tensors(learner.models), target / "weights.pt")
        process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()
