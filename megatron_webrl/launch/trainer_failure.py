"""Falls: a trainer rank that ends badly takes all others with it, on every node, and all start again from a checkpoint.

The lives of a job's trainer are its attempts, counted from 0. Whoever watches a rank that ends badly declares the fall
of the attempt, through the control plane; the first word counts. Everyone who watches ranks kills its own and starts
them as the next attempt. An attempt that completes a checkpoint gives those after it the full number of restarts again.

    trainer/failure/<attempt>   how it came to an end: a Fall
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.tracking import events
from megatron_webrl.tracking.events import EventLog
from megatron_webrl.tracking.latest_checkpoint import find_latest_checkpoint


@dataclass(frozen=True)
class TrainerFailure:
    """How an attempt of the trainer came to an end."""

    role: str
    reason: str
    time: float  # unix time, seconds
    checkpoint: str  # name of the newest complete one then; empty: none
    consecutive_failures: int  # falls without a checkpoint completed in between, this one included

    def job_outcome(self, config: Config) -> str | None:
        """How the job ends, if the trainer has fallen too often; None if it is to start again."""
        limit = config.run.max_trainer_restarts
        if self.consecutive_failures <= limit:
            return None
        return (
            f"failed: the trainer failed {self.consecutive_failures} times in a row without a new checkpoint "
            f"(run.max_trainer_restarts={limit}); the last time: {self.reason}"
        )


def failure_of_attempt(control: ControlClient, attempt: int) -> TrainerFailure | None:
    """How an attempt fell, if it did."""
    fields = control.get_json(_key(attempt))
    return TrainerFailure(**fields) if isinstance(fields, dict) else None


def record_failure(
    control: ControlClient,
    config: Config,
    journal: EventLog,
    attempt: int,
    role: str,
    reason: str,
    log: Path | None = None,
) -> TrainerFailure:
    """A rank of the attempt has ended badly; returns how the attempt fell, as everyone is told.

    `journal`: of who declares it. All ranks start again together, which is one event: that of the first fall.
    """
    newest = find_latest_checkpoint(config.run_folder)
    checkpoint = newest.name if newest else ""
    before = failure_of_attempt(control, attempt - 1)
    in_a_row = before.consecutive_failures + 1 if before is not None and before.checkpoint == checkpoint else 1
    mine = TrainerFailure(role, reason, time.time(), checkpoint, in_a_row)
    fall = TrainerFailure(**json.loads(control.store.compare_set(_key(attempt), "", json.dumps(asdict(mine)))))
    if fall == mine:
        journal.add(role, events.RESTARTED if fall.job_outcome(config) is None else events.FAILED, reason, log)
    return fall


def _key(attempt: int) -> str:
    return f"trainer/failure/{attempt}"
