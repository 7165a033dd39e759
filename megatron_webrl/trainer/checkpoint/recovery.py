"""Recover after a trainer that died in the same job: which tickets survive, which episodes are rolled back.

The weights go back to the checkpoint; workers, engines and rings keep running. A ticket that was issued in the job, or
is open in the checkpoint, and is not closed in the checkpoint's accounting, is one of three:

    in flight   claimed by a worker, not done: its group will come, or a restarted worker runs it
    adopted     done, with all its episodes in a ring: they count when they are trained or dropped
    reissued    the rest: trained or dropped by the dead trainer after the checkpoint, or never claimed

The first two survive; the others are open tickets of the next ticket epoch. Claims are read before the rings: a group
marked as done was in its ring before that. A trainer logs an episode (episodes.jsonl) before it frees the record: a
logged episode beyond the checkpoint is rolled back if its record is gone, else it is counted again.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.tickets import TICKET_DONE, TICKET_FENCE, TicketEpoch
from megatron_webrl.ring.damaged_records import undamaged_trajectories
from megatron_webrl.track import episode_log
from megatron_webrl.track.episode_log import line_identity, trajectory_identity
from megatron_webrl.trainer.accounting import DAMAGED_COUNTER, Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState
from megatron_webrl.trainer.checkpoint.resume_point import ResumePoint
from megatron_webrl.trainer.multi_node.exchange import MultiNodeExchange, RecordSource, SingleNodeExchange
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

_CLOSED_BEFORE = "accounting/closed_before"  # episodes closed when the job started, and their bytes in episodes.jsonl


def make_resume_point(
    control: ControlClient,
    exchange: SingleNodeExchange | MultiNodeExchange,
    state: TrainerState,
    folder: Path,
    is_first_rank: bool,
) -> ResumePoint:
    """The resume point of `state`; after a recovery, no claims until the coordinator opens the job. Collective."""
    resume_point = None
    if is_first_rank and control.ticket_epoch_count():
        resume_point = _recover(control, exchange.record_source, state, folder)
    elif is_first_rank:
        closed = Accounting.from_state_dict(state.accounting).closed_episodes
        resume_point = ResumePoint.for_new_job(
            state.restart_epoch, state.version, state.closed_tickets, state.open_tickets, closed
        )
        control.put_json(_CLOSED_BEFORE, {"episodes": closed, "bytes": state.episode_log_bytes})
        episode_log.clear_rolled_back(folder)
    exchange.finish_collecting()
    shared = broadcast_object(resume_point)
    assert shared is not None
    return shared


def _recover(control: ControlClient, records: RecordSource, state: TrainerState, folder: Path) -> ResumePoint:
    fence, epochs = control.fence_tickets(), control.ticket_epochs()
    claims = ticket_claims(epochs, control.claims(epochs[0].first_slot, fence), fence)  # before reading the rings
    closed = Accounting.from_state_dict(state.accounting).closed_episodes
    before = control.get_json(_CLOSED_BEFORE)
    assert isinstance(before, dict)
    found = undamaged_trajectories(records, records.committed(()))  # others are counted when groups are collected
    next_ticket = epochs[-1].next_ticket_at(fence)
    arrived = {trajectory_identity(trajectory) for trajectory in found.values()}
    counted_identities, by_instance = set(), Counter[str]()
    start = episode_log.size_of_lines(folder, before["episodes"], before["bytes"])
    for line in episode_log.iterate_lines(folder, start, closed - before["episodes"]):
        by_instance[line["worker"]] += 1
        if line_identity(line) in arrived:
            counted_identities.add(line_identity(line))
    surviving, reissued = split_tickets(claims, state, next_ticket, complete_groups(found.values()))
    # The trainer may die between counting an episode and freeing its record.
    obsolete = [
        number
        for number, trajectory in found.items()
        if trajectory.ticket in reissued or trajectory_identity(trajectory) in counted_identities
    ]
    present = {trajectory_identity(trajectory) for number, trajectory in found.items() if number not in obsolete}
    rolled_back = episode_log.roll_back(folder, closed, present, state.episode_log_bytes)
    records.acknowledge(obsolete)
    # A group with a damaged record is incomplete although its worker is done with it: its other episodes end here.
    logged = counted_identities | {line_identity(line) for line in rolled_back}
    control.add(DAMAGED_COUNTER, sum(trajectory_identity(found[number]) not in logged for number in obsolete))

    restart_epoch = max(state.restart_epoch, epochs[-1].restart_epoch + 1)
    adopted = sum(claims[ticket] == TICKET_DONE for ticket in surviving)
    log.info(
        "restart epoch %d resumes from version %d: %d groups in flight, %d adopted, %d reissued; "
        "%d episodes of the job rolled back",
        restart_epoch, state.version, len(surviving) - adopted, adopted, len(reissued), len(rolled_back),
    )  # fmt: skip
    ticket_epoch = TicketEpoch(restart_epoch, state.version, fence + 1, reissued, next_ticket)
    by_instance.update(line["worker"] for line in rolled_back)
    return ResumePoint(ticket_epoch, epochs, surviving, before["episodes"], by_instance, len(rolled_back))


def ticket_claims(epochs: Sequence[TicketEpoch], claims: Sequence[str], end_slot: int) -> dict[int, str]:
    """State of each ticket that a job has issued: the last claimer's instance id, TICKET_DONE, or TICKET_FENCE if free.

    `claims`: one per slot, from the first slot of the first epoch up to `end_slot`, exclusive.
    """
    by_ticket: dict[int, str] = {}
    for number, epoch in enumerate(epochs):
        by_ticket |= dict.fromkeys(epoch.open_tickets, TICKET_FENCE)  # unless their slots were claimed
        fence = epochs[number + 1].first_slot - 1 if number + 1 < len(epochs) else end_slot
        for slot in range(epoch.first_slot, fence):
            by_ticket[epoch.ticket_at(slot)] = claims[slot - epochs[0].first_slot]
    return by_ticket


def complete_groups(trajectories: Iterable[Trajectory]) -> set[int]:
    """Tickets of the groups whose episodes are all among the trajectories."""
    indices: dict[int, set[int]] = defaultdict(set)
    sizes: dict[int, int] = {}
    for trajectory in trajectories:
        indices[trajectory.ticket].add(trajectory.index)
        sizes[trajectory.ticket] = trajectory.group_size
    return {ticket for ticket, present in indices.items() if len(present) == sizes[ticket]}


def split_tickets(
    claims: Mapping[int, str], state: TrainerState, first_new_ticket: int, complete: Container[int]
) -> tuple[frozenset[int], tuple[int, ...]]:
    """The surviving tickets and, in order, the reissued ones, among those that `state` has not closed.

    `first_new_ticket`: the lowest ticket that was never issued. `complete`: tickets of groups complete in a ring.
    """
    first_unissued_at_checkpoint = state.closed_tickets + len(state.open_tickets)
    candidates = {*state.open_tickets, *range(first_unissued_at_checkpoint, first_new_ticket)}
    surviving = set()
    for ticket in candidates:
        claim = claims.get(ticket, TICKET_FENCE)
        if claim not in (TICKET_DONE, TICKET_FENCE) or (claim == TICKET_DONE and ticket in complete):
            surviving.add(ticket)
    return frozenset(surviving), tuple(sorted(candidates - surviving))
