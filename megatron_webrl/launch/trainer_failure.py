"""The failure of a trainer attempt, agreed on by every machine of a job through the control service.

When one rank fails, all ranks on every machine are killed and start again from the newest checkpoint as the next
attempt, counted from 0. The machine that sees a rank fail stores a TrainerFailure as JSON in trainer/failure/<attempt>;
the first record wins. A checkpoint completed by an attempt resets the number of consecutive failures: restarts are
limited by progress rather than by time, because without a checkpoint each begins at the same one.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.types import failed_outcome
from megatron_webrl.util.restart_policy import restart_delay


@dataclass(frozen=True)
class TrainerFailure:
    """Why one attempt of the trainer ended."""

    role: str
    reason: str
    time: float  # unix time, seconds
    checkpoint: str  # name of the newest complete checkpoint at that time; empty: none
    consecutive_failures: int  # without a new checkpoint, this one included
    delay_seconds: float  # before the restart
    infrastructure: bool  # whether the rank lost its file system or the control service

    def job_outcome(self, config: Config) -> str | None:
        """The outcome of the job if the restarts are used up; None if the trainer is to start again."""
        limit = config.run.max_trainer_restarts
        if self.consecutive_failures <= limit:
            return None
        return failed_outcome(
            f"the trainer failed {self.consecutive_failures} times in a row without a new checkpoint "
            f"(run.max_trainer_restarts={limit}); the last time: {self.reason}",
            self.infrastructure,
        )


def failure_of_attempt(control: ControlClient, attempt: int) -> TrainerFailure | None:
    """The recorded failure of an attempt, if any."""
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
    infrastructure: bool = False,
) -> TrainerFailure:
    """Record the failure of an attempt and add it to `journal`, unless one is recorded; returns the recorded one."""
    previous = failure_of_attempt(control, attempt - 1)
    try:
        newest = find_latest_checkpoint(config.run_folder)
        checkpoint = newest.name if newest else ""
    except OSError:  # perhaps what the rank died of: no progress is known
        checkpoint = previous.checkpoint if previous else ""
    same = previous is not None and previous.checkpoint == checkpoint
    count = previous.consecutive_failures + 1 if previous is not None and same else 1
    delay = restart_delay(count, random.random())
    own = TrainerFailure(role, reason, time.time(), checkpoint, count, delay, infrastructure)
    recorded = TrainerFailure(**control.put_if_absent(_key(attempt), asdict(own)))
    if recorded == own:
        journal.add(role, events.RESTARTED if own.job_outcome(config) is None else events.FAILED, reason, log)
    return recorded


def _key(attempt: int) -> str:
    return f"trainer/failure/{attempt}"
