"""Checkpoints in Megatron's distributed format, loadable at another tensor- and data-parallel size.

    checkpoints/latest                    name of the newest complete checkpoint
    checkpoints/version-000005/megatron/  model, optimiser, schedule
    checkpoints/version-000005/state.json the rest: see TrainerState

The trainer draws no random numbers of its own (no dropout; orders come from run.seed and the version), so
there is no generator state to keep.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_webrl.trainer.learner import Learner

OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read. The message names the folder."""


@dataclass(frozen=True)
class TrainerState:
    """Everything of a run that is not a tensor."""

    version: int
    incarnation: int
    base: int  # tickets trained or dropped
    open_tickets: tuple[int, ...]  # taken, neither trained nor dropped: they are issued again
    accounting: dict[str, Any]
    dropped_tickets: int
    mlflow_run: str | None = None
    updates: list[dict[str, Any]] = field(default_factory=list)


def save(folder: Path, learner: Learner, state: TrainerState) -> Path:
    """Write a checkpoint and name it latest once it is complete. Collective; returns its folder."""
    target = folder / f"version-{state.version:06d}"
    temporary = folder / f".writing-{state.version:06d}"
    first = torch.distributed.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "megatron").mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_sharded_state(learner, is_loading=False), str(temporary / "megatron"))
    torch.distributed.barrier()
    if first:
        (temporary / "state.json").write_text(json.dumps(asdict(state), indent=1))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        pointer = folder / ".latest"
        pointer.write_text(target.name)
        pointer.rename(folder / "latest")
    torch.distributed.barrier()
    return target


def latest(folder: Path) -> Path:
    """The newest complete checkpoint. Raises CheckpointError."""
    pointer = folder / "latest"
    if not pointer.is_file():
        raise CheckpointError(f"{folder} holds no complete checkpoint")
    target = folder / pointer.read_text().strip()
    if not (target / "state.json").is_file():
        raise CheckpointError(f"{target} is named latest but holds no state.json")
    return target


def read_state(checkpoint: Path) -> TrainerState:
    """The state of a checkpoint without its tensors."""
    fields = json.loads((checkpoint / "state.json").read_text())
    return TrainerState(**{**fields, "open_tickets": tuple(fields["open_tickets"])})


def load(checkpoint: Path, learner: Learner) -> None:
    """Read model, optimiser and schedule in place. Collective. Raises CheckpointError."""
    try:
        loaded = dist_checkpointing.load(_sharded_state(learner, is_loading=True), str(checkpoint / "megatron"))
    except dist_checkpointing.core.CheckpointingException as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    learner.chunks[0].module.load_state_dict(loaded["model"])
    learner.optimization.load_state_dict(loaded["optimizer"])
    learner.optimization.scheduler.num_steps = 0  # restoring counts the checkpoint's steps on top
    learner.optimization.scheduler.load_state_dict(loaded["scheduler"])


def _sharded_state(learner: Learner, *, is_loading: bool) -> dict[str, Any]:
    learner.optimization.allocate_state()
    # Drawing up the optimiser's part fills tensors of the model's part in: both come from one call.
    model = learner.chunks[0].module.sharded_state_dict()
    optimizer = learner.optimization.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=OPTIMIZER_METADATA
    )
    return {"model": model, "optimizer": optimizer, "scheduler": learner.optimization.scheduler.state_dict()}
