"""Where an incarnation begins: its tickets, what it has taken over, and what of the job was counted before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from megatron_webrl.control.control_plane import TicketEpoch, ticket_limit
from megatron_webrl.types import Trajectory


@dataclass(frozen=True)
class ResumePoint:
    """Of one incarnation; the same on all ranks."""

    ticket_epoch: TicketEpoch
    earlier_ticket_epochs: tuple[TicketEpoch, ...] = ()  # of this job, in their order
    surviving_tickets: frozenset[int] = frozenset()  # tickets taken before that are in flight, or in a ring
    episodes_closed_before: int = 0  # episodes that were closed when the job began
    episodes_counted: Mapping[str, int] = field(
        default_factory=Counter
    )  # of the job, closed or rolled back: by life of worker
    episodes_rolled_back: int = (
        0  # episodes of the job that a trainer had closed after the checkpoint to which it went back
    )

    @classmethod
    def for_new_job(
        cls,
        restart_epoch: int = 0,
        version: int = 0,
        closed_tickets: int = 0,
        open_tickets: tuple[int, ...] = (),
        closed_episodes: int = 0,
    ) -> ResumePoint:
        """That of a job: `base` tickets and `closed` episodes are done with. Without arguments: that of a run."""
        return cls(
            TicketEpoch(restart_epoch, version, closed_tickets, open_tickets, closed_tickets + len(open_tickets)),
            episodes_closed_before=closed_episodes,
        )

    @property
    def unclosed_tickets(self) -> frozenset[int]:
        """All tickets that were taken before and are not closed."""
        return self.surviving_tickets.union(self.ticket_epoch.open_tickets)

    def is_closed(self, ticket: int) -> bool:
        """Whether a ticket was trained or dropped before."""
        return (
            ticket < self.ticket_epoch.next_ticket
            and ticket not in self.surviving_tickets
            and ticket not in self.ticket_epoch.open_tickets
        )

    def ticket_limit(self, closed: int, ahead: int, groups_per_update: int) -> int:
        """Where the counter of positions may get to once `closed` tickets are closed since; see ticket_limit."""
        return ticket_limit(self.ticket_epoch.first_slot, len(self.surviving_tickets), closed, ahead, groups_per_update)

    def checkpoint_tickets(self, taken: int, closed: Set[int]) -> tuple[int, tuple[int, ...]]:
        """For a checkpoint: how many tickets are closed in the whole run, and which ones are open, in order.

        taken: where the counter stands; closed: those closed since the beginning. Every ticket below the number of both
        together is closed, or open.
        """
        fresh = self.ticket_epoch.next_ticket_at(taken)
        open_tickets = self.unclosed_tickets.union(range(self.ticket_epoch.next_ticket, fresh)) - closed
        return fresh - len(open_tickets), tuple(sorted(open_tickets))

    def belongs_to_job(self, trajectory: Trajectory) -> bool:
        """Whether a record was written in this job; what an earlier one has left does not count."""
        return any(
            trajectory.restart_epoch == start.restart_epoch
            for start in (*self.earlier_ticket_epochs, self.ticket_epoch)
        )

    def oldest_version(self, trajectory: Trajectory, fixed_weights: bool) -> int | None:
        """The version that a trajectory's oldest token counts as; None without tokens.

        A version that was lost in a restart is of other weights than the one that has its number now. It counts as the
        version from which the run went on, and where all tokens of a batch are to have the same weights
        (`fixed_weights`) as the one before that.
        """
        oldest = trajectory.oldest_version
        later = [
            s.version
            for s in (*self.earlier_ticket_epochs, self.ticket_epoch)
            if s.restart_epoch > trajectory.restart_epoch
        ]
        if oldest is None or not later or oldest <= min(later):
            return oldest
        return min(later) - fixed_weights
