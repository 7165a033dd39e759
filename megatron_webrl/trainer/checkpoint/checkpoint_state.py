"""A learner's checkpointed state - weights, optimiser, schedule, random number generators - and its two ways.

Keys and shapes are those of whole tensors, so a checkpoint loads in any parallel layout; RNG states fit one only.

Megatron plans, names and lays out the shards. Its AsyncCallsQueue and writers are not used: they wait for a writer
without a limit, start a server process and grandchildren that outlive a killed trainer, and a rank that meets a full
disk outside the shards leaves the other ranks waiting in a collective. Here a forked process that reports its errors
writes every byte but the final index.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron_webrl.control.child_process import describe_exit, die_with_parent
from megatron_webrl.model.build import is_first_replica
from megatron_webrl.model.convert.hf_files import copy_metadata
from megatron_webrl.model.value_head import VALUE_HEAD
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.parallel import all_gather_object, broadcast_object
from megatron_webrl.util.atomic_file import fsync, fsync_tree

log = logging.getLogger(__name__)

SAVE_STRATEGY = ("torch_dist", 1)
# Megatron 0.19 uses another package's writer by default; 0.16 has only its own, and no such argument.
_TAKES_STRATEGY = "async_strategy" in inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
_OWN_WRITER = {"async_strategy": "mcore"} if _TAKES_STRATEGY else {}
Result = TypeVar("Result")
_KILL_SECONDS = 1.0


def one_line_error(error: BaseException) -> str:
    """An error as one line: type and first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


class ForkedTaskError(RuntimeError):
    """The task failed, was killed or timed out. The message is one line."""


class ForkedTask:
    """A function running in a forked child. It dies with this process; `result` never waits past the timeout.

    The child lacks the other threads: the function must need no lock that one may hold, no CUDA and no logging. A
    thread waits for its end: it is no zombie however late `result` is called.
    """

    def __init__(self, function: Callable[[], Any], timeout_seconds: float) -> None:
        """Start `function`; its result must be picklable. Call from the main thread: the child dies with the thread."""
        self._deadline, self._timeout_seconds = time.monotonic() + timeout_seconds, timeout_seconds
        self._outcome, sender = multiprocessing.Pipe(duplex=False)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(function, sender, parent)
        sender.close()
        self._status = 0  # as os.waitpid returns it; valid once the thread has ended
        self._reaper = threading.Thread(target=self._reap, name="forked task", daemon=True)
        self._reaper.start()

    def _reap(self) -> None:
        _, self._status = os.waitpid(self.pid, 0)

    @property
    def done(self) -> bool:
        """Whether `result` would return without waiting for the function."""
        return self._outcome.poll() or time.monotonic() > self._deadline  # an ended child has closed its end

    def result(self) -> Any:
        """Wait for the function and return its result. Raises ForkedTaskError. Call it once."""
        outcome: tuple[bool, Any] | None = None
        in_time = self._outcome.poll(max(0.0, self._deadline - time.monotonic()))
        if in_time:
            with suppress(EOFError, OSError):  # it was killed
                outcome = self._outcome.recv()
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._outcome.close()
        self._reaper.join(_KILL_SECONDS)  # a file system that stalls keeps a killed process longer
        if not in_time:
            raise ForkedTaskError(f"not finished within {self._timeout_seconds:.0f} s")
        if outcome is None:
            raise ForkedTaskError(f"the writing process was {describe_exit(os.waitstatus_to_exitcode(self._status))}")
        if not outcome[0]:
            raise ForkedTaskError(outcome[1])
        return outcome[1]


def _run_child(function: Callable[[], Any], sender: Connection, parent: int) -> None:
    """Run the function in the child and exit; does not return."""
    try:
        die_with_parent(parent=parent)
        gc.disable()  # a collection would run finalisers of objects that belong to the parent
        torch.set_num_threads(1)  # the pool of threads was not copied
        try:
            outcome = (True, function())
        except Exception as error:  # every error is reported to the parent
            outcome = (False, one_line_error(error))
        sender.send(outcome)
    finally:
        os._exit(0)


def run_on_first_rank(action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Call `action` on the first rank; returns its result and the error, one of them None, on every rank. Collective.

    Only OSError and CheckpointError count as errors; they become one line.
    """
    outcome: tuple[Result | None, str | None] = (None, None)
    if torch.distributed.get_rank() == 0:
        try:
            outcome = (action(), None)
        except OSError as error:
            outcome = (None, one_line_error(error))
        except CheckpointError as error:
            outcome = (None, str(error))
    return broadcast_object(outcome)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy, keeping the writer and the index that it has planned."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *strategy: Any) -> Any:
        self.writer, self.index = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, *strategy)


@dataclass
class CheckpointPlan:
    """One rank's share of a checkpoint. Keep it until the forked process has written the share.

    On CUDA the tensors are in pinned memory, which a fork shares with this process instead of copying it on a write:
    freed, torch would give it to the next pinned tensor, and the forked process would write that one's bytes.
    """

    folder: Path
    common: dict[str, Any]  # state that is not tensors; the same on all ranks
    buckets: list[Any]  # tensors of this rank's files, in host memory
    writer: FileSystemWriterAsync
    index: Any  # first rank: the location of each shard

    @property
    def bytes(self) -> int:
        """Size of this rank's tensors."""
        return sum(tensor.nbytes for _, _, (_, tensors) in self.buckets for _, tensor in tensors)

    def write_task(self) -> Callable[[], list[Any]]:
        """A function that writes this rank's shards and returns their locations."""
        return partial(_write_shards, self.buckets, self.writer.transforms)

    def write_index(self, results: list[list[Any]]) -> None:
        """First rank: write the index from the shard locations of all ranks. Raises OSError."""
        self.writer.finish(self.index, results)
        fsync(self.folder / "megatron")


def plan_checkpoint(state: dict[str, Any], folder: Path, *, validate: bool) -> CheckpointPlan:
    """Distribute a sharded state dict over the ranks, and copy this rank's share to host memory. Collective.

    `validate`: let Megatron verify that every element is written exactly once.
    """
    # Otherwise Megatron starts a server process for the results, which outlives a killed trainer.
    filesystem_async._results_queue = queue.SimpleQueue()
    shards, common = save_preprocess(state, validate)
    strategy = _Strategy(*SAVE_STRATEGY, thread_count=1)
    with _no_look_at_the_folder():
        request = strategy.async_save(shards, str(folder / "megatron"), **_OWN_WRITER)
    buckets = request.preload_fn() if request.preload_fn else []
    strategy.writer.write_buckets = None  # the tensors on the device
    return CheckpointPlan(folder, common, buckets, strategy.writer, strategy.index)


@contextmanager
def _no_look_at_the_folder() -> Iterator[None]:
    """While Megatron plans, which makes the folder, that is there, on each rank: an error of one would end them all."""
    original = FileSystemWriterAsync.prepare_local_plan
    FileSystemWriterAsync.prepare_local_plan = lambda self, plan: plan  # as the original returns it
    try:
        yield
    finally:
        FileSystemWriterAsync.prepare_local_plan = original


def write_metadata(folder: Path, common: dict[str, Any], state: dict[str, Any], model: Path) -> None:
    """First rank: write all files but the shards and their index. Raises OSError."""
    # Megatron 0.19 would put `common` among the shards, where 0.16 does not look; both read this file.
    torch.save(common, folder / "megatron" / "common.pt")
    save_config(CheckpointingConfig(*SAVE_STRATEGY), str(folder / "megatron"))
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    copy_metadata(model, folder / "hf")
    for path in (folder / "megatron" / "common.pt", folder / "megatron" / "metadata.json", folder / "state.json"):
        fsync(path)
    fsync_tree(folder / "hf")
    fsync(folder)


def _write_shards(buckets: list[Any], transforms: Any) -> list[Any]:
    results: list[Any] = []
    for number, bucket in enumerate(buckets):
        written: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(number)
        FileSystemWriterAsync.write_preloaded_data([transforms], number, bucket, written, pending, use_fsync=True)
        _, result = written.get_nowait()
        if isinstance(result, Exception):
            raise result
        results += result
    return results


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
    with learner.optimizer.resident():
        return _load_learner(checkpoint / "megatron", learner)


def _load_learner(folder: Path, learner: Learner) -> list[str]:
    with _checkpoint_errors(folder):
        common = _read_common(folder)
        same_layout, shards = common["layout"] == parallel_layout(), common.get("optimizer_shards", "whole")
        wanted = sharded_learner_state(learner, shards, is_loading=True, with_rng_states=same_layout)
        _check_tensors(wanted["models"], _stored_shapes(folder), folder)
        wanted["models"] = _of_first_replicas(wanted["models"], learner.chunks)
        loaded = dist_checkpointing.load(wanted, str(folder))
    _set_weights(loaded.get("models", {}), learner.chunks)  # nothing was read on a rank without first replicas
    learner.optimizer.load_sharded_state(loaded.get("optimizer", {}), shards, loaded["adam_steps"])
    if same_layout:
        set_rng_states(loaded["random"])
    else:
        layout = common["layout"]
        log.info("%s has another parallel layout (%s): RNG states are not restored", folder.parent, layout)
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
            raise CheckpointError(f"tensor {name} {list(shape)} is missing from {folder}")
        if stored[name] != shape:
            raise CheckpointError(f"tensor {name} of {folder} has shape {list(stored[name])}, expected {list(shape)}")
    for name in sorted(stored.keys() - shapes.keys()):
        raise CheckpointError(f"tensor {name} of {folder} is unexpected: the model has no such tensor")


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
