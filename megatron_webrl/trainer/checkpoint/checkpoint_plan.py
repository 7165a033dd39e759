"""What each rank writes of a checkpoint in Megatron's distributed format, and the writing itself.

Megatron plans, names and lays out the shards. Its own asynchronous writers are not used: they start a server process
and grandchildren that outlive a killed trainer, and a rank that meets a full disk outside of the shards leaves the
other ranks waiting in a collective. Here every byte but the final index is written by a process that reports.
"""

from __future__ import annotations

import inspect
import json
import queue
from collections.abc import Callable
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
from megatron_webrl.trainer.checkpoint.checkpoint_files import fsync, fsync_tree

SAVE_STRATEGY = ("torch_dist", 1)
# Megatron 0.19 takes the writer of another package unless told otherwise; 0.16 has only its own, and no such argument.
_TAKES_STRATEGY = "async_strategy" in inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
_OWN_WRITER = {"async_strategy": "mcore"} if _TAKES_STRATEGY else {}


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy, which keeps hold of the writer and the index that it has planned."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *strategy: Any) -> Any:
        self.writer, self.index = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, *strategy)


@dataclass
class CheckpointPlan:
    """One rank's part of a checkpoint."""

    folder: Path
    common: dict[str, Any]  # what is no tensor; the same on all ranks
    buckets: list[Any]  # what goes to this rank's files, in host memory
    writer: FileSystemWriterAsync
    index: Any  # first rank: where each shard will lie

    @property
    def bytes(self) -> int:
        """Size of this rank's tensors."""
        return sum(tensor.nbytes for _, _, (_, tensors) in self.buckets for _, tensor in tensors)

    def take_write_task(self) -> Callable[[], list[Any]]:
        """Writes this rank's shards and returns where they lie; takes the tensors out of the plan."""
        buckets, self.buckets, self.writer.write_buckets = self.buckets, [], None
        return partial(_write_shards, buckets, self.writer.transforms)

    def write_index(self, results: list[list[Any]]) -> None:
        """First rank: write the index, from what `work` returned on all ranks. Raises OSError."""
        self.writer.finish(self.index, results)
        fsync(self.folder / "megatron")


def plan_checkpoint(state: dict[str, Any], folder: Path, *, validate: bool) -> CheckpointPlan:
    """Share a sharded state dict out over the ranks, and copy this rank's part to host memory. Collective.

    `check`: let Megatron prove that every element is written exactly once.
    """
    # Megatron would start a server process for the results, which outlives a killed trainer.
    filesystem_async._results_queue = queue.SimpleQueue()
    shards, common = save_preprocess(state, validate)
    strategy = _Strategy(*SAVE_STRATEGY, thread_count=1)
    request = strategy.async_save(shards, str(folder / "megatron"), **_OWN_WRITER)
    buckets = request.preload_fn() if request.preload_fn else []
    return CheckpointPlan(folder, common, buckets, strategy.writer, strategy.index)


def write_metadata(folder: Path, common: dict[str, Any], state: dict[str, Any], model: Path) -> None:
    """First rank: everything but the shards and their index. Raises OSError."""
    # 0.19 would put this among the shards, where 0.16 does not look; both read the file.
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
