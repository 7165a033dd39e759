"""Plan and write a checkpoint in Megatron's distributed format.

Megatron plans, names and lays out the shards. Its AsyncCallsQueue and writers are not used: they wait for a writer
without a limit, start a server process and grandchildren that outlive a killed trainer, and a rank that meets a full
disk outside the shards leaves the other ranks waiting in a collective. Here a forked process that reports its errors
writes every byte but the final index.
"""

from __future__ import annotations

import gc
import inspect
import json
import multiprocessing
import os
import queue
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

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_webrl.control.child_process import describe_exit, die_with_parent
from megatron_webrl.model.convert.hf_files import copy_metadata
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.util.atomic_file import fsync, fsync_tree

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
