"""Rank body of the test of checkpoints in which each rank writes its own part of the optimizer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.trainer import TrainerConfig
from tests.trainer.checkpoint.small_learner import (
    LAYOUTS,
    Layout,
    checkpoints_in,
    laid_out,
    make_learner,
    save,
    scramble,
    session,
    step,
    tensors_of,
)


def shards_of_ranks(rank: int, folder: str) -> None:
    """Each layout saves at step 2, resumes, and continues as it would have; other layouts are refused."""
    found: dict[Any, Any] = {}
    with session(rank, folder):
        for layout in LAYOUTS:
            with laid_out(layout):
                found[layout.name] = _resume(layout, Path(folder) / layout.name)
        with laid_out(LAYOUTS[1]):
            found["refused"] = _refusal(LAYOUTS[1], Path(folder) / LAYOUTS[0].name)
    torch.save(found, f"{folder}/shards-{rank}.pt")


def _resume(layout: Layout, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Tensors after five steps, with and without a resume after two, and the names of the saved tensors."""
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    learner = make_learner(layout)
    scramble(learner)
    for _ in range(2):
        step(learner)
    saved = save(checkpoints_in(folder, optimizer_shards="ranks"), learner, 2)
    resumed = make_learner(layout)
    load_learner(saved, resumed)
    ends = []
    for each, name in ((learner, "straight"), (resumed, "resumed")):
        for _ in range(3):
            step(each)
        ends.append(tensors_of(save(checkpoints_in(folder / name), each, 5)))
    return ends[0], ends[1], sorted(tensors_of(saved))


def _refusal(layout: Layout, folder: Path) -> str:
    from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError, check_resumable

    checkpoint, trainer = folder / "checkpoints" / "version-000002", TrainerConfig(data_parallel=2)
    check_resumable(checkpoint, trainer)
    trainer.tensor_parallel = layout.tensor
    try:
        check_resumable(checkpoint, trainer)
    except CheckpointError as error:
        return str(error)
    return "loaded"
