"""Where an incarnation begins: its tickets, what it has taken over, and what of the job was counted before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from megatron_webrl.control import Start, ticket_limit
from megatron_webrl.types import Trajectory


@dataclass(frozen=True)
class Beginning:
    """Of one incarnation; the same on all ranks."""

    start: Start
    earlier: tuple[Start, ...] = ()  # of this job, in their order
    survivors: frozenset[int] = frozenset()  # tickets taken before that are in flight, or in a ring
    closed: int = 0  # episodes that were closed when the job began
    counted: Mapping[str, int] = field(default_factory=Counter)  # of the job, closed or rolled back: by life of worker
    rolled_back: int = 0  # episodes of the job that a trainer had closed after the checkpoint to which it went back

    @classmethod
    def first(
        cls, incarnation: int = 0, version: int = 0, base: int = 0, open_tickets: tuple[int, ...] = (), closed: int = 0
    ) -> Beginning:
        """That of a job: `base` tickets and `closed` episodes are done with. Without arguments: that of a run."""
        return cls(Start(incarnation, version, base, open_tickets, base + len(open_tickets)), closed=closed)

    @property
    def open(self) -> frozenset[int]:
        """All tickets that were taken before and are not closed."""
        return self.survivors.union(self.start.open_tickets)

    def is_closed(self, ticket: int) -> bool:
        """Whether a ticket was trained or dropped before."""
        return ticket < self.start.fresh and ticket not in self.survivors and ticket not in self.start.open_tickets

    def limit(self, closed: int, ahead: int, groups_per_update: int) -> int:
        """Where the counter of positions may get to once `closed` tickets are closed since; see ticket_limit."""
        return ticket_limit(self.start.first, len(self.survivors), closed, ahead, groups_per_update)

    def tickets_at(self, taken: int, closed: Set[int]) -> tuple[int, tuple[int, ...]]:
        """For a checkpoint: how many tickets are closed in the whole run, and which ones are open, in order.

        taken: where the counter stands; closed: those closed since the beginning. Every ticket below the number of both
        together is closed, or open.
        """
        fresh = self.start.fresh_at(taken)
        open_tickets = self.open.union(range(self.start.fresh, fresh)) - closed
        return fresh - len(open_tickets), tuple(sorted(open_tickets))

    def is_of_job(self, trajectory: Trajectory) -> bool:
        """Whether a record was written in this job; what an earlier one has left does not count."""
        return any(trajectory.incarnation == start.incarnation for start in (*self.earlier, self.start))

    def oldest_version(self, trajectory: Trajectory, fixed_weights: bool) -> int | None:
        """The version that a trajectory's oldest token counts as; None without tokens.

        A version that was lost in a restart is of other weights than the one that has its number now. It counts as the
        version from which the run went on, and where all tokens of a batch are to have the same weights
        (`fixed_weights`) as the one before that.
        """
        oldest = trajectory.oldest_version
        later = [s.version for s in (*self.earlier, self.start) if s.incarnation > trajectory.incarnation]
        if oldest is None or not later or oldest <= min(later):
            return oldest
        return min(later) - fixed_weights
