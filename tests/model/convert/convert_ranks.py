"""The two gloo processes of the conversion tests; the first writes the models' tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_webrl.model import platform as platforms
from megatron_webrl.model.layout import ParallelSizes
from tests.trainer.ranks import process_groups

LAYOUTS: dict[str, tuple[ParallelSizes, list[str]]] = {
    "tensor": (ParallelSizes(tensor=2), ["dense"]),
    "pipeline": (ParallelSizes(pipeline=2), ["hybrid"]),
    "virtual": (ParallelSizes(pipeline=2, virtual=2), ["tied"]),
    "expert": (ParallelSizes(expert=2), ["moe"]),
    "expert tensor": (ParallelSizes(tensor=2, expert_tensor=2), ["hybrid moe"]),
}


def run(platform: platforms.Platform, _: Path, folder: Path) -> dict[tuple[str, str], list[dict[str, torch.Tensor]]]:
    """Build models in every layout, fill them from their folder and their checkpoint, and save each once."""
    found = {}
    for layout, (sizes, names) in LAYOUTS.items():
        with process_groups(sizes):
            for name in names:
                found[layout, name] = _examine(folder, name, layout, platform)
    return found


def _examine(folder: Path, name: str, layout: str, platform: platforms.Platform) -> list[dict[str, torch.Tensor]]:
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
