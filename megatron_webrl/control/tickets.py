"""What the slots of the ticket counter mean. docs/rollout.md

Slot n may be claimed while n is below the limit that the trainer raises. After a resume the first slots stand for the
tickets open in the checkpoint. A trainer that restarts within the job fences off the slots claimed before and starts
another ticket epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TICKET_DONE = "done"  # owner of a closed slot, whose group is in the ring; no role has this name
TICKET_FENCE = "fence"  # owner of a slot between two ticket epochs, which stands for no ticket


@dataclass(frozen=True)
class TicketEpoch:
    """Maps slots of the counter to tickets, from the start of one restart epoch until the next."""

    restart_epoch: int
    version: int
    first_slot: int  # the epoch's first
    open_tickets: tuple[int, ...]  # claimed before and to be run again: the epoch's first slots stand for them
    next_ticket: int  # ticket of the slot after those

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TicketEpoch:
        return cls(**{**fields, "open_tickets": tuple(fields["open_tickets"])})

    def ticket_at(self, slot: int) -> int:
        """The ticket of a slot at or after first_slot."""
        index = slot - self.first_slot
        return self.open_tickets[index] if index < len(self.open_tickets) else self.next_ticket_at(slot)

    def next_ticket_at(self, slot: int) -> int:
        """The lowest ticket never claimed, if `slot` is the next to be claimed."""
        return self.next_ticket + max(0, slot - self.first_slot - len(self.open_tickets))


@dataclass(frozen=True)
class TicketClaim:
    """The right to run a ticket."""

    slot: int  # of the counter
    ticket: int
    restart_epoch: int  # in which its slot was claimed


def ticket_epoch_at(epochs: Sequence[TicketEpoch], slot: int) -> TicketEpoch:
    """The epoch of a slot, out of a job's epochs in order."""
    return next(epoch for epoch in reversed(epochs) if epoch.first_slot <= slot)


def ticket_limit(
    first_slot: int, surviving_tickets: int, closed_tickets: int, updates_ahead: int, groups_per_update: int
) -> int:
    """Limit of the ticket counter (docs/rollout.md): a group started below it will be fresh enough to train on.

    first_slot: of the epoch; surviving_tickets: claimed before it and kept; closed_tickets: trained or dropped in it.
    With the counter at n, (n - first_slot) + surviving - closed tickets are open: at most those of the next update and
    of `updates_ahead` more. Without a restart the limit is (updates_ahead + version + 1) * groups_per_update + dropped.
    """
    return first_slot - surviving_tickets + closed_tickets + (updates_ahead + 1) * groups_per_update
