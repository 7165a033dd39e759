"""The right to run a group, and how many tickets the trainer issues. docs/rollout.md"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_webrl.types import TaskReference


@dataclass(frozen=True)
class TicketClaim:
    """The right to run a ticket."""

    ticket: int
    task: TaskReference
    restart_epoch: int  # in which it was claimed

    @classmethod
    def from_json(cls, claim: list[Any]) -> TicketClaim:
        """From a reply of the control service."""
        ticket, task, restart_epoch = claim
        return cls(ticket, TaskReference(*task), restart_epoch)


def ticket_limit(surviving_tickets: int, closed_tickets: int, updates_ahead: int, groups_per_update: int) -> int:
    """Number of tickets to issue in a restart epoch (docs/rollout.md): their groups will be fresh enough to train on.

    surviving_tickets: claimed before it and kept; closed_tickets: trained or dropped in it. After n tickets n +
    surviving - closed are open: at most those of the next update and of `updates_ahead` more. Without a restart the
    limit is (updates_ahead + version + 1) * groups_per_update + dropped.
    """
    return closed_tickets - surviving_tickets + (updates_ahead + 1) * groups_per_update
