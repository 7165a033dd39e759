"""Write a job's last checkpoint outside the run's folder, which could not take it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_webrl.track.run_lock import Launch
from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.util.history import History, restore_unwritten

log = logging.getLogger(__name__)


def save_in_fallback(
    failed: Checkpointer,
    folder: Path,
    launch: Launch,
    learner: Learner,
    state: TrainerState,
    histories: Sequence[History],
) -> Checkpointer:
    """Write `state` to a fallback folder of the run; returns what wrote it. Collective.

    Its `last_error` names both errors if this save fails, too. `histories`: on the first rank, those of the run; lines
    that could not be written are stored with the state.
    """
    saver = Checkpointer(
        folder / "checkpoints",
        failed.model_folder,
        failed.settings,
        failed.report_progress,
        staging=launch.staging_in(folder),
    )
    unwritten = {history.path.name: history.unwritten for history in histories}
    saver.start_save(learner, replace(state, unwritten_lines=unwritten))
    saver.close()
    if saver.last_error is not None:
        saver.last_error = f"{failed.last_error}; the fallback folder: {saver.last_error}"
    elif histories:  # once, not on every rank
        log.warning(
            "the last checkpoint, of version %d, is in %s, as the run's folder could not take it: %s",
            state.version,
            folder,
            failed.last_error,
        )
    return saver


def restore_histories(run_folder: Path, state: TrainerState) -> None:
    """Complete the run's histories with the lines that are stored in a checkpoint. Raises OSError."""
    for name, (start, lines) in (state.unwritten_lines or {}).items():
        restore_unwritten(run_folder / name, start, lines)
