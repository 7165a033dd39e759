"""Write the trainer's checkpoints in forked processes while training continues. See docs/checkpoints.md.

checkpoints/version-000005/megatron/   weights, optimiser, schedule, RNG states; loads in any parallel layout
checkpoints/version-000005/hf/         the model folder without weights, so that the checkpoint can be converted
checkpoints/version-000005/state.json  TrainerState
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.trainer import CheckpointConfig
from megatron_webrl.model.convert.hf_files import copy_passthrough
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import STAGING_PREFIX
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.checkpoint.checkpoint_state import (
    CheckpointPlan,
    ForkedTask,
    ForkedTaskError,
    one_line_error,
    plan_checkpoint,
    run_on_first_rank,
    sharded_learner_state,
    write_metadata,
)
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.parallel import all_gather_object

log = logging.getLogger(__name__)

FREE_SPACE_MARGIN_BYTES = 2**26  # for the index, the model's configuration files and the file system's own needs
DELETE_TIMEOUT_SECONDS = 60.0  # limit of waiting for the deletion of old checkpoints
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class TrainerState:
    """The state of a run that is not tensors."""

    version: int
    restart_epoch: int
    closed_tickets: int  # tickets trained or dropped
    open_tickets: tuple[int, ...]  # issued, neither trained nor dropped: issued again after a resume
    accounting: dict[str, Any]
    dropped_tickets: int
    task_sampler: dict[str, Any] | None = None  # TaskSampler.state_dict
    episode_log_bytes: int | None = None  # size of episodes.jsonl at the checkpoint
    has_critic: bool | None = None  # None in a checkpoint that does not say it

    @property
    def next_ticket(self) -> int:
        """The lowest ticket that was never issued."""
        return self.closed_tickets + len(self.open_tickets)


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """The state of a checkpoint without its tensors. Raises CheckpointError."""
    path = checkpoint / "state.json"
    try:
        fields = json.loads(path.read_text())
        known = {spec.name: fields[spec.name] for spec in dataclasses.fields(TrainerState) if spec.name in fields}
        return TrainerState(**{**known, "open_tickets": tuple(fields["open_tickets"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {one_line_error(error)}") from error


@dataclass
class _Save:
    version: int
    folder: Path
    plan: CheckpointPlan  # holds the tensors that the task writes
    task: ForkedTask
    started: float
    blocking_seconds: float  # during which training waited for it
    bytes: int  # of all ranks


class Checkpointer:
    """Saves all checkpoints of a run. Every method is collective over all trainer ranks; none raises on a full disk.

    `start_save` copies the state and starts writing; `poll`, once per update, commits the checkpoint when all ranks
    have written; `wait_for_save` waits for that. A failed save is logged and counted; the next one is tried as usual.
    """

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        settings: CheckpointConfig,
        report_progress: Callable[[], None] = lambda: None,
        sync_histories: Callable[[], None] = lambda: None,
        staging: Path | None = None,
        timeout_seconds: float = 900.0,
    ) -> None:
        """`folder`: the run's checkpoints. `model_folder`: the Hugging Face folder whose configuration is copied along,
        and its tensors that no parameter holds.

        `report_progress` is called while a save is waited for; `sync_histories` flushes the files that a state refers
        to, on the first rank. It may raise OSError. `staging`: that of the launch in `folder`; None if no other
        process writes to it. `timeout_seconds`: limit of writing one checkpoint.
        """
        self.folder, self.model_folder, self.settings = folder, model_folder, settings
        self.timeout_seconds = timeout_seconds
        self.report_progress = report_progress
        self._sync_histories = sync_histories
        self.last_completed: tuple[int, Path] | None = None  # version and folder of this process's newest checkpoint
        self.failures = 0
        self.last_error: str | None = None  # of the last save; None if it succeeded
        self._metrics: dict[str, float] = {}
        self._is_first_rank = torch.distributed.get_rank() == 0
        self._current: _Save | None = None
        self._validated = False
        self._deletion: threading.Thread | None = None
        self._staging = folder / f"{STAGING_PREFIX}000000" if staging is None else staging
        if self._is_first_rank:
            if staging is None:
                self._staging.mkdir(parents=True, exist_ok=True)
            _delete_leftovers(self._staging)

    def start_save(self, learner: Learner, state: TrainerState) -> None:
        """Start a checkpoint of the current state, after waiting for one in progress."""
        self.wait_for_save()
        started = time.monotonic()
        folder = files.temporary_folder(self._staging, state.version)
        if self._run_on_first_rank(state.version, lambda: self._prepare(folder)) is None:
            return
        with learner.optimizer.resident():  # until the forked task has its own copy
            self._start_writing(learner, state, folder, started)

    def _start_writing(self, learner: Learner, state: TrainerState, folder: Path, started: float) -> None:
        sharded_state = sharded_learner_state(learner, self.settings.optimizer_shards, is_loading=False)
        plan = plan_checkpoint(sharded_state, folder, validate=not self._validated)
        self._validated = True  # the distribution over the ranks does not change within a run
        size = torch.tensor(plan.bytes, device=next(learner.chunks[0].parameters()).device)
        torch.distributed.all_reduce(size)
        if self._run_on_first_rank(state.version, lambda: _check_space(folder, int(size))) is None:
            self._discard(folder)
            return
        write_shards, is_first_rank, model_folder = plan.write_task(), self._is_first_rank, self.model_folder
        layout = {name: plan.common[name] for name in ("layout", "optimizer_shards")}  # a launch checks them
        write_rest = partial(write_metadata, folder, plan.common, asdict(state) | layout, model_folder)

        def write() -> Any:
            if is_first_rank:
                copy_passthrough(model_folder, folder, find_latest_checkpoint(self.folder.parent))
                write_rest()
            return write_shards()

        task = ForkedTask(write, self.timeout_seconds)
        blocking_seconds = time.monotonic() - started
        self._current = _Save(state.version, folder, plan, task, started, blocking_seconds, int(size))

    def _prepare(self, folder: Path) -> Path:
        self._sync_histories()
        return files.make_empty_folder(folder)

    def poll(self) -> None:
        """Commit the checkpoint in progress if all ranks have written it; does not wait for them."""
        if self._current is not None and self._all_done(self._current):
            self._complete(self._current)

    def wait_for_save(self) -> None:
        """Wait for the checkpoint in progress, at most Config.checkpoint_timeout_seconds from its start."""
        if (save := self._current) is not None:
            started = time.monotonic()
            while not self._all_done(save):  # polling keeps each collective far below its timeout
                self.report_progress()
                time.sleep(_POLL_SECONDS)
            save.blocking_seconds += time.monotonic() - started
            self._complete(save)

    def close(self) -> None:
        """Wait for the checkpoint in progress and for the deletion of old checkpoints."""
        self.wait_for_save()
        if self._deletion is not None:
            self._deletion.join(DELETE_TIMEOUT_SECONDS)

    def pop_metrics(self) -> dict[str, float]:
        """Metrics of the checkpoint completed since the last call, and the number of failures so far, if any."""
        metrics, self._metrics = self._metrics, {}
        return metrics | ({"checkpoint/failures": float(self.failures)} if self.failures else {})

    def _all_done(self, save: _Save) -> bool:
        return all(all_gather_object(save.task.done))

    def _complete(self, save: _Save) -> None:
        started, self._current = time.monotonic(), None
        outcome: tuple[list[Any], str | None]  # the locations of this rank's shards, or the error of writing them
        try:
            outcome = save.task.result(), None
        except ForkedTaskError as error:
            outcome = [], str(error)
        outcomes: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.gather_object(outcome, outcomes if self._is_first_rank else None, dst=0)
        path = self._run_on_first_rank(save.version, lambda: _commit(save, outcomes))
        if path is None:
            self._discard(save.folder)
            return
        self.last_completed = (save.version, path)
        blocked, mib = save.blocking_seconds + time.monotonic() - started, save.bytes / 2**20
        self._metrics = {
            "checkpoint/blocking_seconds": blocked,
            "checkpoint/write_seconds": started - save.started,
            "checkpoint/size_mib": mib,
        }
        if self._is_first_rank:
            self._delete_obsolete(path)
            log.info("checkpoint %s: %.1f MiB, training blocked for %.2f s", path, mib, blocked)

    def _run_on_first_rank(self, version: int, action: Callable[[], Path]) -> Path | None:
        """The result of `action` on every rank, or None if it failed, which is logged and counted."""
        path, self.last_error = run_on_first_rank(action)
        if self.last_error is not None:
            self.failures += 1
            if self._is_first_rank:
                what = f"checkpoint {version} of {self.folder}"
                log.error("%s could not be written, training continues without it: %s", what, self.last_error)
        return path

    def _discard(self, folder: Path) -> None:
        if self._is_first_rank:
            shutil.rmtree(folder, ignore_errors=True)

    def _delete_obsolete(self, newest: Path) -> None:
        """Delete old checkpoints in a thread: on some file systems that takes as long as writing them."""
        if self._deletion is not None:
            self._deletion.join(DELETE_TIMEOUT_SECONDS)
        paths = files.obsolete_checkpoints(newest, self.settings.keep)

        def delete() -> None:
            try:
                files.delete_checkpoints(paths, self._staging)
            except OSError as error:
                log.error("an old checkpoint could not be deleted: %s", one_line_error(error))

        self._deletion = threading.Thread(target=delete, name="delete checkpoints", daemon=True)
        self._deletion.start()


def _commit(save: _Save, outcomes: list[tuple[list[Any], str | None]]) -> Path:
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise CheckpointError(f"rank {rank}: {error}")
    save.plan.write_index([locations for locations, _ in outcomes])
    return files.commit(save.folder, save.version)


def _check_space(folder: Path, needed: int) -> Path:
    free = shutil.disk_usage(folder).free
    if free < needed + FREE_SPACE_MARGIN_BYTES:
        raise CheckpointError(
            f"it needs {needed / 2**20:.0f} MiB and {FREE_SPACE_MARGIN_BYTES / 2**20:.0f} MiB to spare, but "
            f"{folder.parent} has {free / 2**20:.0f} MiB free; make room"
        )
    return folder


def _delete_leftovers(staging: Path) -> None:
    try:
        if names := files.delete_leftovers(staging):
            log.warning("deleted what interrupted saves left in %s: %s", staging, ", ".join(names))
    except OSError as error:
        log.error("what interrupted saves left in %s could not be deleted: %s", staging, one_line_error(error))
