"""Starts the trainer ranks of this machine again, together with those of all others, after any of them has ended badly.

Launcher (one machine) and node (of many) each have one `Revival`. trainer_failure.py says what they agree on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

from megatron_webrl.config.schema import Config
from megatron_webrl.launch.role_process import KILL_SECONDS, RoleProcess
from megatron_webrl.tracking.events import EventLog

if TYPE_CHECKING:
    from megatron_webrl.control.control_plane import ControlClient
    from megatron_webrl.launch.trainer_failure import TrainerFailure

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between questions whether a rank elsewhere has fallen
BAD_INPUT_EXIT_CODE = 2  # exit code of a role that refuses what it was given: it would do so again


class TrainerRestarter:
    """The trainer ranks among a machine's roles, as one: they live and fall together."""

    def __init__(self, config: Config, control: ControlClient, journal: EventLog, roles: Sequence[RoleProcess]) -> None:
        """`journal`: of this machine; `roles`: all of it, of which those of workers are left alone."""
        self.config, self.control, self.journal = config, control, journal
        self.attempt = 0
        self._roles, self._asked = roles, 0.0

    def record_failure(self, role: RoleProcess, failure: str) -> TrainerFailure:
        """A rank of this machine has ended badly; returns how the attempt fell, which may have begun elsewhere."""
        from megatron_webrl.launch import trainer_failure

        return trainer_failure.record_failure(
            self.control, self.config, self.journal, self.attempt, role.name, failure, role.log
        )

    def poll_failure(self) -> TrainerFailure | None:
        """How the attempt fell, if it did; asks at most every POLL_SECONDS."""
        from megatron_webrl.launch import trainer_failure

        if time.monotonic() - self._asked < POLL_SECONDS:
            return None
        self._asked = time.monotonic()
        return trainer_failure.failure_of_attempt(self.control, self.attempt)

    def restart_ranks(self, fall: TrainerFailure) -> str:
        """Kill the ranks of this machine and start them as the next attempt; returns what to tell people."""
        ranks = [role for role in self._roles if is_trainer_rank(role)]
        for rank in ranks:  # all at once: one that sees another end would only add to the noise
            rank.process.kill()
        for rank in ranks:
            with suppress(TimeoutExpired):
                rank.process.wait(KILL_SECONDS)
        self.attempt += 1
        for rank in ranks:
            rank.command = with_attempt(rank.command, self.attempt)
            self.control.clear_heartbeat(rank.name)
            rank.restart()
        limit = self.config.run.max_trainer_restarts
        since = "" if fall.consecutive_failures == 1 else ", without a checkpoint in between"
        told = (
            f"{fall.reason}; all trainer ranks are started again from "
            f"{fall.checkpoint or 'the beginning: there is no checkpoint'}, time {fall.consecutive_failures} of {limit}{since}"
        )
        log.warning("%s", told)
        return told


def is_trainer_rank(role: RoleProcess) -> bool:
    """Whether a role is a trainer rank."""
    return role.name.startswith("trainer-")


def may_restart(role: RoleProcess, config: Config) -> bool:
    """Whether a rank that ended badly is of those that another start could help."""
    return is_trainer_rank(role) and config.run.max_trainer_restarts > 0 and role.process.poll() != BAD_INPUT_EXIT_CODE


def with_attempt(command: Sequence[str], attempt: int) -> list[str]:
    """The command of a rank, as that of an attempt."""
    words = list(command)
    if "--attempt" in words:
        words[words.index("--attempt") + 1] = str(attempt)
        return words
    return [*words, "--attempt", str(attempt)]
