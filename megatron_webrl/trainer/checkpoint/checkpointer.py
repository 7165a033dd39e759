"""The trainer's checkpoints: written beside the training, complete or not there at all. docs/checkpoints.md.

checkpoints/version-000005/megatron/   weights, optimiser, schedule, random states: any layout of ranks reads them
checkpoints/version-000005/hf/         the model folder without its weights, so that it can be converted as it is
checkpoints/version-000005/state.json  the rest: see TrainerState
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.trainer import CheckpointConfig
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError, latest_checkpoint
from megatron_webrl.trainer.checkpoint.checkpoint_plan import CheckpointPlan, plan_checkpoint, write_metadata
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner as load
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_weights, sharded_learner_state
from megatron_webrl.trainer.checkpoint.forked_task import ForkedTask, ForkedTaskError, one_line_error
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.parallel import broadcast_object

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "TrainerState",
    "latest_checkpoint",
    "load",
    "load_weights",
    "read_trainer_state",
]

log = logging.getLogger(__name__)

FREE_SPACE_MARGIN_BYTES = 2**26  # for the index, the model's description and the file system's own needs
DELETE_TIMEOUT_SECONDS = 60.0  # the end of a job waits so long for old checkpoints to be deleted
_PAUSE = 0.02


@dataclass(frozen=True)
class TrainerState:
    """Everything of a run that is not a tensor."""

    version: int
    restart_epoch: int
    closed_tickets: int  # tickets trained or dropped
    open_tickets: tuple[int, ...]  # taken, neither trained nor dropped: they are issued again
    accounting: dict[str, Any]
    dropped_tickets: int
    mlflow_run_id: str | None = None
    updates: list[dict[str, Any]] = field(default_factory=list)
    task_sampler: dict[str, Any] | None = None  # of an adaptive sampler: see TaskSampler.state


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """The state of a checkpoint without its tensors. Raises CheckpointError."""
    path = checkpoint / "state.json"
    try:
        fields = json.loads(path.read_text())
        return TrainerState(**{**fields, "open_tickets": tuple(fields["open_tickets"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {one_line_error(error)}") from error


class _NotSaved(RuntimeError):
    """A checkpoint that could not be written. The message is one line."""


@dataclass
class _Save:
    """One checkpoint under way."""

    version: int
    folder: Path
    plan: CheckpointPlan
    writing: ForkedTask
    begun: float
    held: float  # seconds that training has waited for it
    bytes: int  # of all ranks


class Checkpointer:
    """All checkpoints of a run. Every method is collective over all trainer ranks; none fails for want of disk.

    `begin` copies the state and starts writing; `poll`, once an update, gives the checkpoint its name when all ranks
    have written; `finish` waits for that. A save that fails is logged and counted, and the next one is tried.
    """

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        settings: CheckpointConfig,
        report_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder`: the run's checkpoints; `model`: the Hugging Face folder whose description goes along.

        `progress` is called while one is waited for.
        """
        self.folder, self.model_folder, self.settings, self._progress = folder, model_folder, settings, report_progress
        self.last_completed: tuple[int, Path] | None = (
            None  # version and folder of the newest that this process completed
        )
        self.failures = 0
        self.last_error: str | None = None  # why the last save failed; None if it did not
        self._figures: dict[str, float] = {}
        self._first = torch.distributed.get_rank() == 0
        self._current: _Save | None = None
        self._checked = False
        self._deleting: threading.Thread | None = None
        if self._first:
            _sweep(folder)

    def start_save(self, learner: Learner, state: TrainerState) -> None:
        """Start a checkpoint of the state as it is; one that is under way is finished first.

        Without settings.asynchronous it is complete, or has failed, on return.
        """
        self.wait_for_save()
        started = time.monotonic()
        folder = files.temporary_folder(self.folder, state.version)
        if self._on_first(state.version, lambda: files.make_empty_folder(folder)) is None:
            return
        plan = plan_checkpoint(sharded_learner_state(learner, is_loading=False), folder, validate=not self._checked)
        self._checked = True  # who writes what does not change within a run
        size = torch.tensor(plan.bytes, device=next(learner.chunks[0].parameters()).device)
        torch.distributed.all_reduce(size)
        if self._on_first(state.version, lambda: _check_space(folder, int(size))) is None:
            self._discard(folder)
            return
        shards, first = plan.take_write_task(), self._first
        rest = partial(write_metadata, folder, plan.common, asdict(state), self.model_folder)

        def work() -> Any:
            if first:
                rest()
            return shards()

        writing = ForkedTask(work, self.settings.timeout_seconds)
        held = time.monotonic() - started
        self._current = _Save(state.version, folder, plan, writing, started, held, int(size))
        if not self.settings.async_save:
            self.wait_for_save()

    def poll(self) -> None:
        """Complete the checkpoint under way if all ranks have written it; does not wait for them."""
        if self._current is not None and self._all_ended(self._current):
            self._complete(self._current)

    def wait_for_save(self) -> None:
        """Wait for the checkpoint under way, at most settings.seconds from its start."""
        if (save := self._current) is not None:
            started = time.monotonic()
            while not self._all_ended(save):  # no rank waits long in one collective, which has a limit of its own
                self._progress()
                time.sleep(_PAUSE)
            save.held += time.monotonic() - started
            self._complete(save)

    def close(self) -> None:
        """Finish, and let the deletion of old checkpoints end."""
        self.wait_for_save()
        if self._deleting is not None:
            self._deleting.join(DELETE_TIMEOUT_SECONDS)

    def pop_metrics(self) -> dict[str, float]:
        """Figures of the checkpoint that was completed since the last call, and failures so far, if any."""
        figures, self._figures = self._figures, {}
        return figures | ({"checkpoint/failures": float(self.failures)} if self.failures else {})

    def _all_ended(self, save: _Save) -> bool:
        flags: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(flags, save.writing.done)
        return all(flags)

    def _complete(self, save: _Save) -> None:
        started, self._current = time.monotonic(), None
        written = started - save.begun
        outcome = _outcome(save.writing)
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.gather_object(outcome, everyone if self._first else None, dst=0)
        path = self._on_first(save.version, lambda: _publish(save, everyone))
        if path is None:
            self._discard(save.folder)
            return
        self.last_completed = (save.version, path)
        if self._first:
            self._delete(path)
        held, mib = save.held + time.monotonic() - started, save.bytes / 2**20
        self._figures = {
            "checkpoint/blocking_seconds": held,
            "checkpoint/write_seconds": written,
            "checkpoint/size_mib": mib,
        }
        if self._first:
            log.info(
                "checkpoint %s: %.1f MiB, written in %.2f s, held training up for %.2f s", path, mib, written, held
            )

    def _on_first(self, version: int, action: Callable[[], Path]) -> Path | None:
        """Do something on the first rank's disk; its result on every rank, or None if it failed, which is noted."""
        outcome: tuple[Path | None, str | None] = (None, None)
        if self._first:
            try:
                outcome = (action(), None)
            except (OSError, _NotSaved) as error:
                outcome = (None, one_line_error(error) if isinstance(error, OSError) else str(error))
        path, self.last_error = broadcast_object(outcome)
        if self.last_error is not None:
            self.failures += 1
            if self._first:
                log.error(
                    "checkpoint %d of %s could not be written, training goes on without it: %s",
                    version,
                    self.folder,
                    self.last_error,
                )
        return path

    def _discard(self, folder: Path) -> None:
        if self._first:
            shutil.rmtree(folder, ignore_errors=True)

    def _delete(self, newest: Path) -> None:
        """Delete old checkpoints in a thread: on some file systems that takes as long as writing them."""
        if self._deleting is not None:
            self._deleting.join(DELETE_TIMEOUT_SECONDS)
        paths = files.obsolete_checkpoints(newest, self.settings.keep, self.settings.keep_every)
        self._deleting = threading.Thread(target=_remove, args=(paths,), name="delete checkpoints", daemon=True)
        self._deleting.start()


def _outcome(writing: ForkedTask) -> tuple[list[Any], str | None]:
    """Where this rank's shards lie, or why they do not."""
    try:
        return writing.result(), None
    except ForkedTaskError as error:
        return [], str(error)


def _publish(save: _Save, outcomes: list[tuple[list[Any], str | None]]) -> Path:
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise _NotSaved(f"rank {rank}: {error}")
    save.plan.write_index([results for results, _ in outcomes])
    return files.commit(save.folder, save.version)


def _check_space(folder: Path, needed: int) -> Path:
    free = shutil.disk_usage(folder).free
    if free < needed + FREE_SPACE_MARGIN_BYTES:
        raise _NotSaved(
            f"it needs {needed / 2**20:.0f} MiB and {FREE_SPACE_MARGIN_BYTES / 2**20:.0f} MiB to spare, but {folder.parent} has "
            f"{free / 2**20:.0f} MiB free; make room"
        )
    return folder


def _sweep(folder: Path) -> None:
    try:
        if left := files.delete_leftovers(folder):
            log.warning("removed what an interrupted save had left in %s: %s", folder, ", ".join(left))
    except OSError as error:
        log.error("what an interrupted save had left in %s could not be removed: %s", folder, one_line_error(error))


def _remove(paths: list[Path]) -> None:
    try:
        files.delete_checkpoints(paths)
    except OSError as error:
        log.error("an old checkpoint could not be deleted: %s", one_line_error(error))
