"""Starts the trainer ranks of this machine again, together with those of all others, after any of them has ended badly.

Launcher (one machine) and node (of many) each have one `Revival`. falls.py says what they agree on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

from megatron_webrl.config import Config
from megatron_webrl.roles import KILL_SECONDS, Role
from megatron_webrl.tracking.events import Journal

if TYPE_CHECKING:
    from megatron_webrl.control import Control
    from megatron_webrl.falls import Fall

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between questions whether a rank elsewhere has fallen
BAD_INPUT = 2  # exit code of a role that refuses what it was given: it would do so again


class Revival:
    """The trainer ranks among a machine's roles, as one: they live and fall together."""

    def __init__(self, config: Config, control: Control, journal: Journal, roles: Sequence[Role]) -> None:
        """`journal`: of this machine; `roles`: all of it, of which those of workers are left alone."""
        self.config, self.control, self.journal = config, control, journal
        self.attempt = 0
        self._roles, self._asked = roles, 0.0

    def fell(self, role: Role, failure: str) -> Fall:
        """A rank of this machine has ended badly; returns how the attempt fell, which may have begun elsewhere."""
        from megatron_webrl import falls

        return falls.declare(self.control, self.config, self.journal, self.attempt, role.name, failure, role.log)

    def heard(self) -> Fall | None:
        """How the attempt fell, if it did; asks at most every POLL_SECONDS."""
        from megatron_webrl import falls

        if time.monotonic() - self._asked < POLL_SECONDS:
            return None
        self._asked = time.monotonic()
        return falls.fall_of(self.control, self.attempt)

    def start_again(self, fall: Fall) -> str:
        """Kill the ranks of this machine and start them as the next attempt; returns what to tell people."""
        ranks = [role for role in self._roles if is_rank(role)]
        for rank in ranks:  # all at once: one that sees another end would only add to the noise
            rank.process.kill()
        for rank in ranks:
            with suppress(TimeoutExpired):
                rank.process.wait(KILL_SECONDS)
        self.attempt += 1
        for rank in ranks:
            rank.command = with_attempt(rank.command, self.attempt)
            self.control.forget(rank.name)
            rank.restart()
        limit = self.config.run.trainer_restarts
        since = "" if fall.in_a_row == 1 else ", without a checkpoint in between"
        told = (
            f"{fall.reason}; all trainer ranks are started again from "
            f"{fall.checkpoint or 'the beginning: there is no checkpoint'}, time {fall.in_a_row} of {limit}{since}"
        )
        log.warning("%s", told)
        return told


def is_rank(role: Role) -> bool:
    """Whether a role is a trainer rank."""
    return role.name.startswith("trainer-")


def may_revive(role: Role, config: Config) -> bool:
    """Whether a rank that ended badly is of those that another start could help."""
    return is_rank(role) and config.run.trainer_restarts > 0 and role.process.poll() != BAD_INPUT


def with_attempt(command: Sequence[str], attempt: int) -> list[str]:
    """The command of a rank, as that of an attempt."""
    words = list(command)
    if "--attempt" in words:
        words[words.index("--attempt") + 1] = str(attempt)
        return words
    return [*words, "--attempt", str(attempt)]
