"""Where a job or a restarted trainer resumes: its tickets, and the episodes counted before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from megatron_webrl.control.tickets import TicketEpoch, ticket_limit
from megatron_webrl.types import Trajectory


@dataclass(frozen=True)
class ResumePoint:
    """Start of one restart epoch; the same on all ranks."""

    ticket_epoch: TicketEpoch
    earlier_ticket_epochs: tuple[TicketEpoch, ...] = ()  # of this job, in order
    surviving_tickets: frozenset[int] = frozenset()  # claimed before the restart; in flight, or complete in a ring
    episodes_closed_before: int = 0  # closed when the job started
    episodes_counted: Mapping[str, int] = field(default_factory=Counter)  # of the job, by worker instance id
    episodes_rolled_back: int = 0  # of the job, closed after the checkpoint to which the trainer returned

    @classmethod
    def for_new_job(
        cls,
        restart_epoch: int = 0,
        version: int = 0,
        closed_tickets: int = 0,
        open_tickets: tuple[int, ...] = (),
        closed_episodes: int = 0,
    ) -> ResumePoint:
        """The resume point of a job's first attempt; without arguments that of a fresh run."""
        return cls(
            TicketEpoch(restart_epoch, version, closed_tickets, open_tickets, closed_tickets + len(open_tickets)),
            episodes_closed_before=closed_episodes,
        )

    @property
    def unclosed_tickets(self) -> frozenset[int]:
        """All tickets that were issued before and are not closed."""
        return self.surviving_tickets.union(self.ticket_epoch.open_tickets)

    def is_closed(self, ticket: int) -> bool:
        """Whether a ticket was trained or dropped before."""
        return (
            ticket < self.ticket_epoch.next_ticket
            and ticket not in self.surviving_tickets
            and ticket not in self.ticket_epoch.open_tickets
        )

    def ticket_limit(self, closed: int, updates_ahead: int, groups_per_update: int) -> int:
        """The limit of the slot counter once `closed` tickets are closed in this epoch; see control's ticket_limit."""
        first_slot, surviving = self.ticket_epoch.first_slot, len(self.surviving_tickets)
        return ticket_limit(first_slot, surviving, closed, updates_ahead, groups_per_update)

    def checkpoint_tickets(self, end_slot: int, closed: Set[int]) -> tuple[int, tuple[int, ...]]:
        """For a checkpoint: the number of tickets closed in the whole run, and the open ones in order.

        `end_slot`: the next unclaimed slot; `closed`: in this epoch. Tickets below both counts' sum are closed or open.
        """
        next_ticket = self.ticket_epoch.next_ticket_at(end_slot)
        open_tickets = self.unclosed_tickets.union(range(self.ticket_epoch.next_ticket, next_ticket)) - closed
        return next_ticket - len(open_tickets), tuple(sorted(open_tickets))

    def belongs_to_job(self, trajectory: Trajectory) -> bool:
        """Whether a record was written in this job; records that an earlier job left do not count."""
        epochs = (*self.earlier_ticket_epochs, self.ticket_epoch)
        return any(trajectory.restart_epoch == epoch.restart_epoch for epoch in epochs)

    def oldest_version(self, trajectory: Trajectory, fixed_weights: bool) -> int | None:
        """The version of a trajectory's oldest token, for its staleness; None without tokens.

        A version lost in a restart had other weights than the one with its number now. It counts as the version from
        which training resumed; or the one before if all tokens of a batch need the same weights (`fixed_weights`).
        """
        oldest = trajectory.oldest_version
        epochs = (*self.earlier_ticket_epochs, self.ticket_epoch)
        resumed_from = [e.version for e in epochs if e.restart_epoch > trajectory.restart_epoch]
        if oldest is None or not resumed_from or oldest <= min(resumed_from):
            return oldest
        return min(resumed_from) - fixed_weights
