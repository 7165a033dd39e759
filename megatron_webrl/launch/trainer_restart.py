"""Restarts this machine's trainer ranks after one failed on any, as agreed through launch/trainer_failure.py."""

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

POLL_SECONDS = 0.5  # between two queries of the control plane for a failure on another machine
BAD_INPUT_EXIT_CODE = 2  # of a role that refuses its input: a restart would end the same way


class TrainerRestarter:
    """Restarts all trainer ranks of one machine as a unit; the local launcher and each node supervisor own one."""

    def __init__(self, config: Config, control: ControlClient, journal: EventLog, roles: Sequence[RoleProcess]) -> None:
        """`journal`: the machine's event log; `roles`: all its processes, of which only trainer ranks are touched."""
        self.config, self.control, self.journal = config, control, journal
        self.attempt = 0
        self._roles, self._polled_at = roles, 0.0

    def record_failure(self, role: RoleProcess, reason: str) -> TrainerFailure:
        """Record that a rank of this machine failed; returns the attempt's first failure, perhaps another machine's."""
        from megatron_webrl.launch import trainer_failure

        return trainer_failure.record_failure(
            self.control, self.config, self.journal, self.attempt, role.name, reason, role.log
        )

    def poll_failure(self) -> TrainerFailure | None:
        """The failure of the current attempt, if any; queries the control plane at most every POLL_SECONDS."""
        from megatron_webrl.launch import trainer_failure

        if time.monotonic() - self._polled_at < POLL_SECONDS:
            return None
        self._polled_at = time.monotonic()
        return trainer_failure.failure_of_attempt(self.control, self.attempt)

    def restart_ranks(self, failure: TrainerFailure) -> str:
        """Kill the ranks of this machine and start them as the next attempt; returns a message for the user."""
        ranks = [role for role in self._roles if is_trainer_rank(role)]
        for rank in ranks:  # all at once: a rank that sees its peers die would log errors of its own
            rank.process.kill()
        for rank in ranks:
            with suppress(TimeoutExpired):
                rank.process.wait(KILL_SECONDS)
        self.attempt += 1
        for rank in ranks:
            rank.command = with_attempt(rank.command, self.attempt)
            self.control.clear_heartbeat(rank.name)
            rank.restart()
        source = failure.checkpoint or "the beginning, as there is no checkpoint"
        count = f"attempt {failure.consecutive_failures} of {self.config.run.max_trainer_restarts}"
        if failure.consecutive_failures > 1:
            count += " without a new checkpoint"
        message = f"{failure.reason}; restarting all trainer ranks from {source} ({count})"
        log.warning("%s", message)
        return message


def is_trainer_rank(role: RoleProcess) -> bool:
    return role.name.startswith("trainer-")


def may_restart(role: RoleProcess, config: Config) -> bool:
    """Whether a failed process is a trainer rank that a restart could help."""
    return is_trainer_rank(role) and config.run.max_trainer_restarts > 0 and role.process.poll() != BAD_INPUT_EXIT_CODE


def with_attempt(command: Sequence[str], attempt: int) -> list[str]:
    """The command of a rank with `--attempt` set."""
    arguments = list(command)
    if "--attempt" in arguments:
        arguments[arguments.index("--attempt") + 1] = str(attempt)
        return arguments
    return [*arguments, "--attempt", str(attempt)]
