"""Falls: a trainer rank that ends badly takes all others with it, on every node, and all start again from a checkpoint.

The lives of a job's trainer are its attempts, counted from 0. Whoever watches a rank that ends badly declares the fall
of the attempt, through the control plane; the first word counts. Everyone who watches ranks kills its own and starts
them as the next attempt. An attempt that completes a checkpoint gives those after it the full number of restarts again.

    trainer/fall/<attempt>   how it came to an end: a Fall
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config import Config
from megatron_webrl.control import Control
from megatron_webrl.tracking import events
from megatron_webrl.tracking.events import Journal
from megatron_webrl.tracking.newest import newest_checkpoint


@dataclass(frozen=True)
class Fall:
    """How an attempt of the trainer came to an end."""

    role: str
    reason: str
    at: float  # unix time, seconds
    checkpoint: str  # name of the newest complete one then; empty: none
    in_a_row: int  # falls without a checkpoint completed in between, this one included

    def outcome(self, config: Config) -> str | None:
        """How the job ends, if the trainer has fallen too often; None if it is to start again."""
        limit = config.run.trainer_restarts
        if self.in_a_row <= limit:
            return None
        return (
            f"failed: the trainer fell {self.in_a_row} times without a checkpoint in between "
            f"(run.trainer_restarts={limit}); the last time: {self.reason}"
        )


def fall_of(control: Control, attempt: int) -> Fall | None:
    """How an attempt fell, if it did."""
    fields = control.value(_key(attempt))
    return Fall(**fields) if isinstance(fields, dict) else None


def declare(
    control: Control, config: Config, journal: Journal, attempt: int, role: str, reason: str, log: Path | None = None
) -> Fall:
    """A rank of the attempt has ended badly; returns how the attempt fell, as everyone is told.

    `journal`: of who declares it. All ranks start again together, which is one event: that of the first fall.
    """
    newest = newest_checkpoint(config.run_folder)
    checkpoint = newest.name if newest else ""
    before = fall_of(control, attempt - 1)
    in_a_row = before.in_a_row + 1 if before is not None and before.checkpoint == checkpoint else 1
    mine = Fall(role, reason, time.time(), checkpoint, in_a_row)
    fall = Fall(**json.loads(control.store.compare_set(_key(attempt), "", json.dumps(asdict(mine)))))
    if fall == mine:
        journal.add(role, events.RESTARTED if fall.outcome(config) is None else events.FAILED, reason, log)
    return fall


def _key(attempt: int) -> str:
    return f"trainer/fall/{attempt}"
