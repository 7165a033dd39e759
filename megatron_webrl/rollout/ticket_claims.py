"""Claim tickets for a worker: first those that an earlier instance of it, or a worker given up, left unfinished."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron_webrl.control.claimer import Claimer
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.control.state import TICKETS
from megatron_webrl.control.tickets import TicketClaim
from megatron_webrl.tasks.files.digests import TASK_FILES, FileDigest, difference_between_nodes

log = logging.getLogger(__name__)


class TicketClaims:
    """A worker's access to the tickets. They are available once the trainer has started an epoch."""

    def __init__(self, control: ControlClient, engines: int, files: Mapping[str, FileDigest] | None = None) -> None:
        """`engines` share the free tickets: a fast worker has room again sooner, and claims more. `files`: the task
        files of the worker by setting, which must be the trainer's.
        """
        self._control, self._files = control, files or {}
        self._claimer = Claimer(control, TICKETS, control.role, engines)
        self._unfinished: list[TicketClaim] | None = None  # that an earlier instance claimed and did not close

    def claim(self, count: int) -> list[TicketClaim]:
        """Up to `count` tickets that are at hand; more are claimed in the background. Never waits.

        Ends the job and raises JobFailed if a task file has other rows than the trainer's.
        """
        if self._unfinished is None:
            if not self._control.ticket_epoch_count():
                return []
            self._check_files()
            self._unfinished = self._control.unfinished_claims()
            if self._unfinished:
                log.info("resuming %d groups that an earlier instance left unfinished", len(self._unfinished))
        claims, self._unfinished = self._unfinished[: max(0, count)], self._unfinished[max(0, count) :]
        return [*claims, *map(TicketClaim.from_json, self._claimer.poll(count - len(claims)))]

    def put_back(self) -> None:
        """While no group can start: let other workers have the tickets that were claimed in the background."""
        self._claimer.put_back()

    def _check_files(self) -> None:
        trainers = self._control.get_json(TASK_FILES, {})
        if difference := difference_between_nodes(trainers, self._files, self._control.role):
            self._control.end_job(f"failed: {difference}")  # a restarted worker would have the same file
            raise JobFailed(difference)
