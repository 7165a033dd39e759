"""Plan and write a checkpoint in Megatron's distributed format.

Megatron plans, names and lays out the shards. Its own asynchronous writers are not used: they start a server process
and grandchildren that outlive a killed trainer, and a rank that meets a full disk outside the shards leaves the other
ranks waiting in a collective. Here a forked process that reports its errors writes every byte but the final index.
"""

from __future__ import annotations

import inspect
import json
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_webrl.model.convert.hf_metadata import copy_metadata
from megatron_webrl.util.atomic_file import fsync, fsync_tree

SAVE_STRATEGY = ("torch_dist", 1)
# Megatron 0.19 uses another package's writer by default; 0.16 has only its own, and no such argument.
_TAKES_STRATEGY = "async_strategy" in inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
_OWN_WRITER = {"async_strategy": "mcore"} if _TAKES_STRATEGY else {}


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
