"""Where a job or a restarted trainer resumes: its tickets, and the episodes counted before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from megatron_webrl.control.tickets import ticket_limit
from megatron_webrl.types import TaskReference, Trajectory


@dataclass(frozen=True)
class ResumePoint:
    """Start of one restart epoch; the same on all ranks."""

    restart_epoch: int = 0
    version: int = 0  # of the policy
    reissued_tickets: tuple[int, ...] = ()  # issued before and not closed: they are issued again, in this order
    next_ticket: int = 0  # the lowest one that was never issued
    surviving_tickets: Mapping[int, TaskReference] = field(default_factory=dict)  # in flight, or complete in a ring
    earlier_epochs: tuple[tuple[int, int], ...] = ()  # of this job, in order: restart epoch and version
    episodes_closed_before: int = 0  # closed when the job started
    episodes_counted: Mapping[str, int] = field(default_factory=Counter)  # of the job, by worker instance id
    episodes_rolled_back: int = 0  # of the job, closed after the checkpoint to which the trainer returned

    @property
    def unclosed_tickets(self) -> frozenset[int]:
        """All tickets that were issued before and are not closed."""
        return frozenset({*self.surviving_tickets, *self.reissued_tickets})

    def is_closed(self, ticket: int) -> bool:
        """Whether a ticket was trained or dropped before."""
        return ticket < self.next_ticket and ticket not in self.unclosed_tickets

    def ticket_limit(self, closed: int, updates_ahead: int, groups_per_update: int) -> int:
        """Number of tickets to issue once `closed` tickets are closed in this epoch; see control's ticket_limit."""
        return ticket_limit(len(self.surviving_tickets), closed, updates_ahead, groups_per_update)

    def checkpoint_tickets(self, next_ticket: int, closed: Set[int]) -> tuple[int, tuple[int, ...]]:
        """For a checkpoint: the number of tickets closed in the whole run, and the open ones in order.

        `next_ticket`: the lowest one that was not issued; `closed`: in this epoch. Tickets below the sum of both counts
        are closed or open.
        """
        open_tickets = self.unclosed_tickets.union(range(self.next_ticket, next_ticket)) - closed
        return next_ticket - len(open_tickets), tuple(sorted(open_tickets))

    def belongs_to_job(self, trajectory: Trajectory) -> bool:
        """Whether a record was written in this job; records that an earlier job left do not count."""
        return trajectory.restart_epoch in (self.restart_epoch, *(epoch for epoch, _ in self.earlier_epochs))

    def oldest_version(self, trajectory: Trajectory, fixed_weights: bool) -> int | None:
        """The version of a trajectory's oldest token, for its staleness; None without tokens.

        A version lost in a restart had other weights than the one with its number now. It counts as the version from
        which training resumed; or the one before if all tokens of a batch need the same weights (`fixed_weights`).
        """
        oldest = trajectory.oldest_version
        epochs = (*self.earlier_epochs, (self.restart_epoch, self.version))
        resumed_from = [version for epoch, version in epochs if epoch > trajectory.restart_epoch]
        if oldest is None or not resumed_from or oldest <= min(resumed_from):
            return oldest
        return min(resumed_from) - fixed_weights
