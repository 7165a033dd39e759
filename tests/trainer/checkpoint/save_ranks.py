"""Rank bodies of the tests of saves: what they contain, how they fail, which checkpoints stay."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from tests.trainer.checkpoint.small_learner import (
    LAYOUTS,
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
from tests.trainer.checkpoint.weights_ranks import small_updates, weights_alone


def names_in(folder: Path) -> list[Path]:
    """All of the checkpoints' folder but the staging folder, and what is in that."""
    checkpoints = folder / "checkpoints"
    return [*checkpoints.glob("[!.]*"), *checkpoints.glob(".staging-*/*")]


def saves(rank: int, folder: str) -> None:
    """Successful and failing saves; writes the observations of each case."""
    found: dict[str, Any] = {}
    with session(rank, folder), laid_out(LAYOUTS[0]):
        learner = make_learner(LAYOUTS[0])
        scramble(learner)
        found["snapshot"] = _snapshot(learner, Path(folder, "snapshot"))
        found["held"] = _held_copies(learner, Path(folder, "held"))
        found["limit"] = _no_room(learner, Path(folder, "limit"))
        found["killed writer"] = _killed_writer(learner, Path(folder, "killed"))
        found["late writer"] = _late_writer(learner, Path(folder, "late"))
        found["names"] = _names(learner, Path(folder, "names"))
        found["weights"] = weights_alone(learner, Path(folder, "weights"))
        found["bf16"] = small_updates(Path(folder, "bf16"))
    torch.save(found, f"{folder}/saves-{rank}.pt")


@contextlib.contextmanager
def _stopped_writers() -> Iterator[None]:
    """Processes that write a checkpoint stop before they have written any of it."""
    from megatron_webrl.trainer.checkpoint import checkpointer
    from megatron_webrl.trainer.checkpoint.checkpoint_state import ForkedTask

    def start(write: Callable[[], Any], timeout_seconds: float) -> ForkedTask:
        task = ForkedTask(lambda: (signal.raise_signal(signal.SIGSTOP), write())[1], timeout_seconds)
        while psutil.Process(task.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        return task

    with mock.patch.object(checkpointer, "ForkedTask", start):
        yield


def _snapshot(learner: Any, folder: Path) -> dict[str, Any]:
    """Weights and moments change while the writer is stopped: the checkpoint must have the earlier ones."""
    checkpoints = checkpoints_in(folder)
    before = tensors_of(save(checkpoints, learner, 1))
    with _stopped_writers():
        checkpoints.start_save(learner, state_of(2))
    checkpoints.poll()
    waited_for = checkpoints._current is not None
    for _ in range(2):
        step(learner)
    os.kill(checkpoints._current.task.pid, signal.SIGCONT)
    checkpoints.close()
    after = tensors_of(checkpoints.last_completed[1])
    return {
        "equal": all(torch.equal(before[name], after[name]) for name in before),
        "tensors": len(before),
        "waited for": waited_for,
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
        "figures": checkpoints.pop_metrics(),
    }


def _held_copies(learner: Any, folder: Path) -> list[int]:
    """Copies in host memory that this process holds while the writer is stopped, and once it has written.

    Copies are made as from a GPU; the originals of the CPU platform live as long as the learner.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    copies: list[weakref.ref[torch.Tensor]] = []

    def preload(buckets: list[Any], non_blocking: bool) -> list[Any]:
        copied = [
            (name, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for name, key, (data, tensors) in buckets
        ]
        copies.extend(weakref.ref(tensor) for _, _, (_, tensors) in copied for _, tensor in tensors)
        return copied

    checkpoints = checkpoints_in(folder)
    with mock.patch.object(FileSystemWriterAsync, "preload_tensors", staticmethod(preload)), _stopped_writers():
        checkpoints.start_save(learner, state_of(1))
    counts = [len(copies), _count_alive(copies)]
    os.kill(checkpoints._current.task.pid, signal.SIGCONT)
    checkpoints.close()
    return [*counts, _count_alive(copies)]


def _count_alive(references: list[weakref.ref[torch.Tensor]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def _no_room(learner: Any, folder: Path) -> dict[str, Any]:
    """One save under a file size limit that the shards exceed, one without."""
    checkpoints = checkpoints_in(folder)
    save(checkpoints, learner, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    checkpoints.start_save(learner, state_of(2))
    checkpoints.wait_for_save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    failed = {
        "trouble": checkpoints.last_error,
        "newest": checkpoints.last_completed[0],
        "figures": checkpoints.pop_metrics(),
        "left": sorted(path.name for path in names_in(folder)),
    }
    torch.distributed.barrier()  # the next save creates its folder there
    save(checkpoints, learner, 3)
    return failed | {"then": (checkpoints.last_error, checkpoints.failures, checkpoints.last_completed[0])}


def _killed_writer(learner: Any, folder: Path) -> dict[str, Any]:
    checkpoints = checkpoints_in(folder)
    with _stopped_writers():
        checkpoints.start_save(learner, state_of(1))
    is_killed = torch.distributed.get_rank() == 1
    os.kill(checkpoints._current.task.pid, signal.SIGKILL if is_killed else signal.SIGCONT)
    checkpoints.wait_for_save()
    failed = (checkpoints.last_error, checkpoints.last_completed)
    save(checkpoints, learner, 2)
    return {"failed": failed, "then": checkpoints.last_completed[0]}


def _late_writer(learner: Any, folder: Path) -> str | None:
    checkpoints = checkpoints_in(folder, timeout_seconds=0.2)
    with _stopped_writers():
        checkpoints.start_save(learner, state_of(1))
    checkpoints.wait_for_save()
    return checkpoints.last_error


def _names(learner: Any, folder: Path) -> dict[str, Any]:
    """Save versions 1 to 7, keeping two; then version 7 again."""
    checkpoints = checkpoints_in(folder, keep=2)
    for version in range(1, 8):
        save(checkpoints, learner, version)
    stay = sorted(path.name for path in names_in(folder))
    again = save(checkpoints_in(folder, keep=2), learner, 7)
    return {"stay": stay, "again": again.name, "then": sorted(p.name for p in names_in(folder))}


def full_disk(rank: int, folder: str, disk: str) -> None:
    """Saves on a small file system: full, read-only, and with room."""
    found = {}
    with session(rank, folder), laid_out(LAYOUTS[0]):
        learner = make_learner(LAYOUTS[0])
        checkpoints = checkpoints_in(Path(disk))
        found["full"] = _try_to_save(
            checkpoints, learner, 1, lambda: Path(disk, "other").write_bytes(bytes(60 * 2**20))
        )
        found["read only"] = _try_to_save(
            checkpoints, learner, 2, lambda: subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        )

        def make_room() -> None:
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            Path(disk, "other").unlink()

        found["then"] = _try_to_save(checkpoints, learner, 3, make_room)
    Path(folder, f"disk-{rank}.json").write_text(json.dumps(found))


def _try_to_save(checkpoints: Any, learner: Any, version: int, prepare: Any) -> list[Any]:
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        prepare()
    torch.distributed.barrier()
    checkpoints.start_save(learner, state_of(version))
    checkpoints.wait_for_save()
    return [checkpoints.last_error, checkpoints.failures, checkpoints.last_completed and checkpoints.last_completed[0]]
