"""Rank bodies of the test that checkpoints load in every parallel layout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trainer.checkpoint.small_learner import (
    LAYOUTS,
    Layout,
    checkpoints_in,
    laid_out,
    make_learner,
    save,
    scramble,
    session,
    state_of,
    step,
    tensors_of,
)


def across_layouts(rank: int, folder: str) -> None:
    """Each layout saves at step 2 and continues to step 5; then each resumes from the checkpoint of each."""
    found: dict[Any, Any] = {}
    with session(rank, folder):
        for layout in LAYOUTS:
            with laid_out(layout):
                _save_and_continue(layout, Path(folder), found)
        for layout in LAYOUTS:
            with laid_out(layout):
                for other in LAYOUTS:
                    _resume_from(layout, other, Path(folder), found)
    torch.save(found, f"{folder}/layouts-{rank}.pt")


def _save_and_continue(layout: Layout, folder: Path, found: dict[Any, Any]) -> None:
    learner = make_learner(layout)
    scramble(learner)
    checkpoints = checkpoints_in(folder / layout.name)
    for _ in range(2):
        step(learner)
    draws()
    checkpoints.start_save(learner, state_of(2))
    found[layout.name, "draws"] = draws()
    for _ in range(3):  # while the checkpoint is written
        step(learner)
    found[layout.name, "optimizers"] = len(learner.optimizer.optimizer.chained_optimizers)
    found[layout.name, "chunks"] = len(learner.chunks)
    found[layout.name] = tensors_of(save(checkpoints, learner, 5))


def _resume_from(layout: Layout, other: Layout, folder: Path, found: dict[Any, Any]) -> None:
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    learner = make_learner(layout)
    load_learner(folder / other.name / "checkpoints" / "version-000002", learner)
    pair = (layout.name, other.name)
    found[pair, "draws"] = draws()
    found[pair, "rate"] = learner.optimizer.learning_rate
    for _ in range(3):
        step(learner)
    found[pair] = tensors_of(save(checkpoints_in(folder / f"{layout.name}-from-{other.name}"), learner, 5))


def draws() -> list[float]:
    """The next number of each random number generator."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        named = torch.rand(()).item()
    return [random.random(), float(np.random.rand()), torch.rand(()).item(), named]
