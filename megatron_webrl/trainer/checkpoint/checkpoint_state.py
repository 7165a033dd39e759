"""Convert a learner to and from checkpointed state: weights, optimiser, schedule, random number generators.

Keys and shapes are those of whole tensors, so a checkpoint loads in any parallel layout; RNG states fit one only.
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
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron_webrl.model.build import is_first_replica
from megatron_webrl.model.value_head import VALUE_HEAD
from megatron_webrl.trainer.checkpoint.checkpoint_files import CRITIC_HINT, CheckpointError, check_same_model_parallel
from megatron_webrl.trainer.checkpoint.checkpoint_writer import one_line_error
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.parallel import all_gather_object

log = logging.getLogger(__name__)

_NOT_WEIGHTS = ("optimizer.", "random_states")


def sharded_learner_state(
    learner: Learner, shards: str, *, is_loading: bool, with_rng_states: bool = True
) -> dict[str, Any]:
    """The learner's state in Megatron's sharded form; `shards`: the optimizer's. Collective when saving."""
    # The optimiser's state refers to tensors of `models`: both must come from one call.
    models = sharded_weights(learner.chunks)
    state: dict[str, Any] = {
        "models": models,
        "scheduler": learner.optimizer.scheduler.state_dict(),
        "adam_steps": learner.optimizer.step_count,
        "layout": parallel_layout(),
        "optimizer_shards": shards,
    }
    # Megatron would store an empty dict as state that all ranks have in common.
    if optimizer := learner.optimizer.sharded_state(models, shards, is_loading=is_loading):
        state["optimizer"] = optimizer
    if with_rng_states:
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        states = None if is_loading else rng_states()
        state["random"] = ShardedObject("random_states", states, (ranks,), (rank,))
    return state


def load_learner(checkpoint: Path, learner: Learner) -> list[str]:
    """Load weights, optimiser, step of the schedule and RNG states in place. Collective. Raises CheckpointError on
    every rank.

    The first replica of a weight is read from storage and broadcast to the others. Returns how the checkpoint's
    schedule differs from the configured one, which holds.
    """
    folder = checkpoint / "megatron"
    with _checkpoint_errors(folder):
        common = _read_common(folder)
        same_layout, shards = common["layout"] == parallel_layout(), common.get("optimizer_shards", "whole")
        if shards == "ranks":
            check_same_model_parallel(common["layout"], parallel_layout(), folder)
        wanted = sharded_learner_state(learner, shards, is_loading=True, with_rng_states=same_layout)
        _check_tensors(wanted["models"], _stored_shapes(folder), folder)
        wanted["models"] = _of_first_replicas(wanted["models"], learner.chunks)
        loaded = dist_checkpointing.load(wanted, str(folder))
    _set_weights(loaded.get("models", {}), learner.chunks)  # nothing was read on a rank without first replicas
    learner.optimizer.load_sharded_state(loaded.get("optimizer", {}), shards, loaded["adam_steps"])
    if same_layout:
        set_rng_states(loaded["random"])
    else:
        log.info("%s has another parallel layout (%s): RNG states are not restored", checkpoint, common["layout"])
    return learner.optimizer.resume_schedule(loaded["scheduler"])


def load_weights(path: Path, chunks: list[Any]) -> None:
    """Load the model's weights from the subfolder megatron/ of a checkpoint or a converted model. Collective.

    The first replica of a weight is read from storage and broadcast to the others. A value head keeps its weights, and
    one that is stored is left out: it belongs to the run that trained it.
    `chunks`: DistributedDataParallel around this rank's model chunks. Make the optimiser afterwards: one that exists
    already keeps its old main weights. Raises CheckpointError on every rank, before a weight changes.
    """
    folder = path / "megatron"
    with _checkpoint_errors(folder):
        wanted = {chunk: _without_value_head(state) for chunk, state in sharded_weights(chunks).items()}
        _check_tensors(wanted, _without_value_head(_stored_shapes(folder)), folder)
        loaded = dist_checkpointing.load(_of_first_replicas(wanted, chunks), str(folder))
    _set_weights(loaded, chunks)


def parallel_layout() -> dict[str, int]:
    """The sizes of the trainer's process groups."""
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
    """States of this process's RNGs: Python's, NumPy's, torch's, the GPU's, and Megatron's named ones."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the states that `rng_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["megatron"])


@contextlib.contextmanager
def _checkpoint_errors(folder: Path) -> Iterator[None]:
    """Turn errors of Megatron, torch and pickle while reading a checkpoint into CheckpointError with the folder."""
    megatron = dist_checkpointing.core.CheckpointingException
    try:
        yield
    except CheckpointError:
        raise
    # torch's CheckpointException does not derive from Exception; it carries the errors of other ranks.
    except (megatron, CheckpointException, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        failures = getattr(error, "failures", None)
        cause = next(iter(failures.values()))[0] if failures else error
        raise CheckpointError(f"{folder}: {one_line_error(cause)}") from error


def _chunk_names(chunks: list[Any]) -> list[str]:
    return [f"model{number}" for number in range(len(chunks))]


def sharded_weights(chunks: list[Any]) -> dict[str, Any]:
    """The weights of the chunks in Megatron's sharded form, by chunk."""
    states = [chunk.module.sharded_state_dict() for chunk in chunks]
    return dict(zip(_chunk_names(chunks), states, strict=True))


def _of_first_replicas(models: dict[str, Any], chunks: list[Any]) -> dict[str, Any]:
    """The sharded weights that this rank reads from storage; the broadcast brings parameters to the other replicas."""

    def is_read(chunk: Any, parameter: torch.Tensor | None, sharded: Any) -> bool:
        if parameter is not None:
            return is_first_replica(parameter, chunk.dp_cp_group, chunk.expt_dp_group)
        # Extra state of modules is empty without fp8; buffers are not broadcast.
        return not isinstance(sharded, ShardedObject) or is_main_replica(sharded.replica_id)

    wanted: dict[str, Any] = {}
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        parameters = dict(chunk.module.named_parameters())
        wanted[name] = {key: each for key, each in models[name].items() if is_read(chunk, parameters.get(key), each)}
    return wanted


def _without_value_head(named: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in named.items() if not name.startswith(f"{VALUE_HEAD}.")}


def _set_weights(loaded: dict[str, Any], chunks: list[Any]) -> None:
    """Copy the weights that this rank has read into the model, and broadcast them to the other replicas. Collective."""
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        # A strict load wants every key; those that this rank has not read keep their values until the broadcast.
        chunk.module.load_state_dict(chunk.module.state_dict() | loaded.get(name, {}))
        chunk.broadcast_params()


def _read_common(folder: Path) -> dict[str, Any]:
    common = dist_checkpointing.load_common_state_dict(str(folder))
    if "layout" not in common:
        raise CheckpointError(
            f"{folder} holds weights without an optimiser, so training cannot resume from it; "
            "model.checkpoint starts a run from its weights"
        )
    return common


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored weights by name. Raises CheckpointError if a file is missing or truncated."""
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is no Megatron distributed checkpoint: it holds no metadata.json")
    index = FileSystemReader(str(folder)).read_metadata()
    ends: dict[str, tuple[int, str]] = {}  # per file the last byte and the tensor that ends there
    for entry, location in (index.storage_data or {}).items():
        end = location.offset + location.length
        if end > ends.get(location.relative_path, (-1, ""))[0]:
            ends[location.relative_path] = (end, entry.fqn)
    for name, (end, tensor) in sorted(ends.items()):
        size = os.path.getsize(folder / name)
        if size < end:
            raise CheckpointError(f"{folder / name} is truncated: it has {size} bytes, but {tensor} ends at byte {end}")
    stored = {name: tuple(entry.size) for name, entry in index.state_dict_metadata.items() if hasattr(entry, "size")}
    return {name: shape for name, shape in stored.items() if not name.startswith(_NOT_WEIGHTS)}


def _check_tensors(wanted: dict[str, Any], stored: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raises CheckpointError for a missing weight, an unexpected one, or one of another shape. Collective."""
    local = {tensor.key: tuple(tensor.global_shape) for tensor in sharded_tensors(wanted)}
    shapes = {name: shape for part in all_gather_object(local) for name, shape in part.items()}
    for name, shape in sorted(shapes.items()):
        if name not in stored:
            raise CheckpointError(f"tensor {name} {list(shape)} is missing from {folder}{_critic_hint(name)}")
        if stored[name] != shape:
            raise CheckpointError(f"tensor {name} of {folder} has shape {list(stored[name])}, expected {list(shape)}")
    for name in sorted(stored.keys() - shapes.keys()):
        raise CheckpointError(
            f"tensor {name} of {folder} is unexpected: the model has no such tensor{_critic_hint(name)}"
        )


def _critic_hint(name: str) -> str:
    return f"; {CRITIC_HINT}" if name.startswith(f"{VALUE_HEAD}.") else ""


def sharded_tensors(state: Any) -> list[ShardedTensor]:
    """The sharded tensors of a nested state."""
    if isinstance(state, ShardedTensor):
        return [state]
    if isinstance(state, ShardedTensorFactory):
        return sharded_tensors(state.build())
    if isinstance(state, dict | list):
        parts = state.values() if isinstance(state, dict) else state
        return [tensor for part in parts for tensor in sharded_tensors(part)]
    return []
