"""Recover after a trainer that died in the same job: which tickets survive, which episodes are rolled back.

The weights go back to the checkpoint; workers, engines and rings keep running. A ticket that was issued in the job, or
is open in the checkpoint, and is not closed in the checkpoint's accounting, is one of three:

    in flight   claimed by a worker, not done: its group will come, or a restarted worker runs it
    adopted     done, with all its episodes in a ring: they count when they are trained or dropped
    reissued    the rest: trained or dropped by the dead trainer after the checkpoint, or never claimed

The first two survive with their tasks; the others are issued again: with their tasks if the checkpoint has them, else
the sampler draws. The queue is rewound before the rings are read: a group marked as done was in its ring before that.
A trainer logs an episode (episodes.jsonl) before it frees the record: a logged episode beyond the checkpoint is rolled
back if its record is gone, else it is counted again.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.control.client import ControlClient
from megatron_webrl.ring.record import undamaged_trajectories
from megatron_webrl.track import episodes
from megatron_webrl.track.episodes import line_identity, trajectory_identity
from megatron_webrl.trainer.accounting import DAMAGED_COUNTER, Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState
from megatron_webrl.trainer.multi_node.exchange import RecordExchange
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.types import TaskReference, Trajectory

log = logging.getLogger(__name__)

_CLOSED_BEFORE = "accounting/closed_before"  # episodes closed when the job started, and their bytes in episodes.jsonl


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
        """The version of a trajectory's oldest token, for its staleness; None without tokens."""
        return self._known_version(trajectory.oldest_version, trajectory, fixed_weights)

    def newest_version(self, trajectory: Trajectory, fixed_weights: bool) -> int | None:
        """The version of a trajectory's newest token; None without tokens."""
        return self._known_version(trajectory.newest_version, trajectory, fixed_weights)

    def _known_version(self, version: int | None, trajectory: Trajectory, fixed_weights: bool) -> int | None:
        """A version of a trajectory's tokens, as one that still exists.

        A version lost in a restart had other weights than the one with its number now. It counts as the version from
        which training resumed; or the one before if all tokens of a batch need the same weights (`fixed_weights`).
        """
        epochs = (*self.earlier_epochs, (self.restart_epoch, self.version))
        resumed_from = [version for epoch, version in epochs if epoch > trajectory.restart_epoch]
        if version is None or not resumed_from or version <= min(resumed_from):
            return version
        return min(resumed_from) - fixed_weights


def make_resume_point(
    control: ControlClient,
    exchange: RecordExchange,
    state: TrainerState,
    folder: Path,
    is_first_rank: bool,
) -> ResumePoint:
    """The resume point of `state`; after a recovery, no claims until the coordinator opens the job. Collective."""
    resume_point = None
    if is_first_rank and control.ticket_epoch_count():
        resume_point = _recover(control, exchange, state, folder)
    elif is_first_rank:
        closed = Accounting.from_state_dict(state.accounting).closed_episodes
        resume_point = ResumePoint(
            state.restart_epoch, state.version, state.open_tickets, state.next_ticket, episodes_closed_before=closed
        )
        control.put_json(_CLOSED_BEFORE, {"episodes": closed, "bytes": state.episode_log_bytes})
        episodes.clear_rolled_back(folder)
    exchange.finish_collecting()
    shared = broadcast_object(resume_point)
    assert shared is not None
    return shared


def _recover(control: ControlClient, records: RecordExchange, state: TrainerState, folder: Path) -> ResumePoint:
    epochs, in_flight, next_ticket = control.rewind_tickets()  # before reading the rings
    closed = Accounting.from_state_dict(state.accounting).closed_episodes
    before = control.get_json(_CLOSED_BEFORE)
    assert isinstance(before, dict)
    found = undamaged_trajectories(records, records.committed(()))  # others are counted when groups are collected
    arrived = {trajectory_identity(trajectory) for trajectory in found.values()}
    counted_identities, by_instance = set(), Counter[str]()
    start = episodes.size_of_lines(folder, before["episodes"], before["bytes"])
    for line in episodes.iterate_lines(folder, start, closed - before["episodes"]):
        by_instance[line["worker"]] += 1
        if line_identity(line) in arrived:
            counted_identities.add(line_identity(line))
    surviving, reissued = split_tickets(in_flight, complete_groups(found.values()), state, next_ticket)
    # The trainer may die between counting an episode and freeing its record.
    obsolete = [
        number
        for number, trajectory in found.items()
        if trajectory.ticket in reissued or trajectory_identity(trajectory) in counted_identities
    ]
    present = {trajectory_identity(trajectory) for number, trajectory in found.items() if number not in obsolete}
    rolled_back = episodes.roll_back(folder, closed, present, state.episode_log_bytes)
    records.acknowledge(obsolete)
    # A group with a damaged record is incomplete although its worker is done with it: its other episodes end here.
    logged = counted_identities | {line_identity(line) for line in rolled_back}
    control.add(DAMAGED_COUNTER, sum(trajectory_identity(found[number]) not in logged for number in obsolete))

    restart_epoch = max(state.restart_epoch, epochs[-1][0] + 1)
    adopted = len(surviving.keys() - in_flight.keys())
    log.info(
        "restart epoch %d resumes from version %d: %d groups in flight, %d adopted, %d reissued; "
        "%d episodes of the job rolled back",
        restart_epoch, state.version, len(surviving) - adopted, adopted, len(reissued), len(rolled_back),
    )  # fmt: skip
    by_instance.update(line["worker"] for line in rolled_back)
    return ResumePoint(
        restart_epoch, state.version, reissued, next_ticket, surviving, tuple(epochs), before["episodes"], by_instance,
        len(rolled_back),
    )  # fmt: skip


def complete_groups(trajectories: Iterable[Trajectory]) -> dict[int, TaskReference]:
    """Tickets of the groups whose episodes are all among the trajectories, and their tasks."""
    groups: dict[int, dict[int, Trajectory]] = defaultdict(dict)
    for trajectory in trajectories:
        groups[trajectory.ticket][trajectory.index] = trajectory
    members = {ticket: list(group.values()) for ticket, group in groups.items()}
    return {
        ticket: TaskReference.of(group[0].task)
        for ticket, group in members.items()
        if len(group) == group[0].group_size
    }


def split_tickets(
    in_flight: Mapping[int, TaskReference],
    complete: Mapping[int, TaskReference],
    state: TrainerState,
    next_ticket: int,
) -> tuple[dict[int, TaskReference], tuple[int, ...]]:
    """The surviving tickets with their tasks and, in order, the reissued ones, among those that `state` has not closed.

    `complete`: of groups complete in a ring; `next_ticket`: the lowest ticket that was never issued.
    """
    candidates = {*state.open_tickets, *range(state.next_ticket, next_ticket)}
    known = {**complete, **in_flight}
    surviving = {ticket: known[ticket] for ticket in sorted(candidates & known.keys())}
    return surviving, tuple(sorted(candidates - surviving.keys()))
