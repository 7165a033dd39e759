"""What a checkpoint holds of a learner, and putting it back: weights, optimiser, schedule, random states.

Keys and shapes are those of the whole tensors, so a checkpoint loads in any layout of ranks. Random states belong to
one layout: in another one, each rank keeps those that it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.checkpoint.forked_task import one_line_error
from megatron_webrl.trainer.learner import Learner

log = logging.getLogger(__name__)

_NOT_WEIGHTS = ("optimizer.", "random_states")


def sharded_learner_state(learner: Learner, *, is_loading: bool, with_rng_states: bool = True) -> dict[str, Any]:
    """The learner's state in Megatron's sharded form. Collective when saving."""
    # Drawing up the optimiser's part fills tensors of the model's part in: both come from one call.
    models = sharded_weights(learner.chunks)
    state: dict[str, Any] = {
        "models": models,
        "scheduler": learner.optimizer.scheduler.state_dict(),
        "adam_steps": learner.optimizer.step_count,
        "layout": parallel_layout(),
    }
    # An empty part would count as what all ranks have in common.
    if optimizer := learner.optimizer.sharded_state(models, is_loading=is_loading):
        state["optimizer"] = optimizer
    if with_rng_states:
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        states = None if is_loading else rng_states()
        state["random"] = ShardedObject("random_states", states, (ranks,), (rank,))
    return state


def load_learner(checkpoint: Path, learner: Learner) -> None:
    """Read everything in place. Collective. Raises CheckpointError on every rank."""
    folder = checkpoint / "megatron"
    with _reading(folder):
        common = _common(folder)
        same = common["layout"] == parallel_layout()
        wanted = sharded_learner_state(learner, is_loading=True, with_rng_states=same)
        _compare(wanted["models"], _stored(folder), folder)
        loaded = dist_checkpointing.load(wanted, str(folder))
    for name, chunk in zip(_chunk_names(learner.chunks), learner.chunks, strict=True):
        chunk.module.load_state_dict(loaded["models"][name])
    learner.optimizer.load_sharded_state(loaded.get("optimizer", {}), loaded["adam_steps"])
    learner.optimizer.scheduler.num_steps = 0  # restoring counts the checkpoint's steps on top
    learner.optimizer.scheduler.load_state_dict(loaded["scheduler"])
    if same:
        set_rng_states(loaded["random"])
    else:
        log.info("%s is of another layout (%s): the random states stay as they are", checkpoint, common["layout"])


def load_weights(path: Path, chunks: list[Any]) -> None:
    """Fill the model from a folder with megatron/: a checkpoint, or a converted model. Collective.

    `chunks`: DistributedDataParallel around the chunks of this rank's model. An optimiser that exists already keeps
    the main weights that it has: make it afterwards. Raises CheckpointError on every rank, before a weight changes.
    """
    folder = path / "megatron"
    with _reading(folder):
        wanted = sharded_weights(chunks)
        _compare(wanted, _stored(folder), folder)
        loaded = dist_checkpointing.load(wanted, str(folder))
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        chunk.module.load_state_dict(loaded[name])


def parallel_layout() -> dict[str, int]:
    """How the trainer's ranks are laid out."""
    return {
        "ranks": torch.distributed.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def rng_states() -> dict[str, Any]:
    """This process's generators: Python's, numpy's, torch's, the GPU's, and Megatron's named ones."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` gave."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["megatron"])


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Name the folder in whatever Megatron, torch and pickle say of a checkpoint that they cannot read."""
    megatron = dist_checkpointing.core.CheckpointingException
    try:
        yield
    except CheckpointError:
        raise
    # CheckpointException is torch's, and no Exception: it carries what other ranks met.
    except (megatron, CheckpointException, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        failures = getattr(error, "failures", None)
        cause = next(iter(failures.values()))[0] if failures else error
        raise CheckpointError(f"{folder}: {one_line_error(cause)}") from error


def _chunk_names(chunks: list[Any]) -> list[str]:
    return [f"model{number}" for number in range(len(chunks))]


def sharded_weights(chunks: list[Any]) -> dict[str, Any]:
    states = [chunk.module.sharded_state_dict() for chunk in chunks]
    return dict(zip(_chunk_names(chunks), states, strict=True))


def _common(folder: Path) -> dict[str, Any]:
    common = dist_checkpointing.load_common_state_dict(str(folder))
    if "layout" not in common:
        raise CheckpointError(
            f"{folder} holds weights without an optimiser, so nothing can be resumed from it; "
            "model.checkpoint starts a run from its weights"
        )
    return common


def _stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored weights by name, after a look at the files. Raises CheckpointError."""
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is no Megatron distributed checkpoint: it holds no metadata.json")
    index = FileSystemReader(str(folder)).read_metadata()
    ends: dict[str, tuple[int, str]] = {}
    for entry, place in (index.storage_data or {}).items():
        end = place.offset + place.length
        if end > ends.get(place.relative_path, (-1, ""))[0]:
            ends[place.relative_path] = (end, entry.fqn)
    for name, (end, tensor) in sorted(ends.items()):
        size = os.path.getsize(folder / name)
        if size < end:
            raise CheckpointError(f"{folder / name} is truncated: it has {size} bytes, but {tensor} ends at byte {end}")
    stored = {name: tuple(entry.size) for name, entry in index.state_dict_metadata.items() if hasattr(entry, "size")}
    return {name: shape for name, shape in stored.items() if not name.startswith(_NOT_WEIGHTS)}


def _compare(wanted: dict[str, Any], stored: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Refuse a checkpoint with a weight too many, one missing or one of another shape. Collective."""
    mine = {tensor.key: tuple(tensor.global_shape) for tensor in _tensors(wanted)}
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, mine)
    shapes = {name: shape for part in parts for name, shape in part.items()}
    for name, shape in sorted(shapes.items()):
        if name not in stored:
            raise CheckpointError(f"tensor {name} {list(shape)} is missing from {folder}")
        if stored[name] != shape:
            raise CheckpointError(f"tensor {name} of {folder} has shape {list(stored[name])}, expected {list(shape)}")
    for name in sorted(stored.keys() - shapes.keys()):
        raise CheckpointError(f"tensor {name} of {folder} is unexpected: the model has no such tensor")


def _tensors(state: Any) -> list[ShardedTensor]:
    """The sharded tensors of a nested state."""
    if isinstance(state, ShardedTensor):
        return [state]
    if isinstance(state, ShardedTensorFactory):
        return _tensors(state.build())
    if isinstance(state, dict | list):
        return [tensor for part in (state.values() if isinstance(state, dict) else state) for tensor in _tensors(part)]
    return []
