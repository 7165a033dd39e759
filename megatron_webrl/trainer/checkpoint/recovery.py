"""What an incarnation takes over from a trainer that died in the same job.

The weights go back to the checkpoint; workers, engines and rings do not. Each ticket that was taken in the job, or is
open in the checkpoint, and is not closed in the checkpoint's account, is one of three:

    in flight   signed by a worker, not done: its group will come, or a later life of the worker runs it
    adopted     done, and all its episodes are in a ring: they count when they are trained or dropped
    again       all else: trained or dropped by the dead trainer after the checkpoint, or never taken

The first two survive. The others are open tickets of the new start. Signatures are read before the rings: a group that
is marked as done was in its ring before that.

A trainer writes down what it counts before it frees the record (episodes.jsonl). So a line beyond the checkpoint's is
rolled back if its record is gone, and its episode counts when its record is there.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_webrl.control.control_plane import TICKET_DONE, TICKET_FENCE, ControlClient, TicketEpoch
from megatron_webrl.ring.record import decode_trajectory
from megatron_webrl.tracking import episode_log
from megatron_webrl.tracking.episode_log import line_identity, trajectory_identity
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState
from megatron_webrl.trainer.checkpoint.resume_point import ResumePoint
from megatron_webrl.trainer.exchange.multi_node_exchange import MultiNodeExchange
from megatron_webrl.trainer.exchange.record_exchange import RecordSource, SingleNodeExchange
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

_BEFORE = "accounting/closed_before"  # episodes that were closed when the job began


def make_resume_point(
    control: ControlClient,
    rings: SingleNodeExchange | MultiNodeExchange,
    state: TrainerState,
    folder: Path,
    first: bool,
) -> ResumePoint:
    """Where the incarnation of `state` begins, which is a fresh run's or a checkpoint's. Collective.

    `first`: on the rank that talks. After a take-over nobody takes a ticket until the job is opened.
    """
    beginning = None
    if first and control.ticket_epoch_count():
        beginning = _take_over(control, rings.record_source, state, folder)
    elif first:
        closed = Accounting.from_state_dict(state.accounting).closed_episodes
        beginning = ResumePoint.for_new_job(
            state.restart_epoch, state.version, state.closed_tickets, state.open_tickets, closed
        )
        control.put_json(_BEFORE, closed)
        episode_log.clear_rolled_back(folder)
    rings.finish_collecting()
    shared = broadcast_object(beginning)
    assert shared is not None
    return shared


def _take_over(control: ControlClient, records: RecordSource, state: TrainerState, folder: Path) -> ResumePoint:
    fence, starts = control.fence_tickets(), control.ticket_epochs()
    taken = ticket_claims(starts, control.claims(starts[0].first_slot, fence), fence)  # before the rings
    closed, before = Accounting.from_state_dict(state.accounting).closed_episodes, control.get_json(_BEFORE)
    assert isinstance(before, int)
    counted = episode_log.read_lines(folder, before, closed)
    known = {line_identity(line) for line in counted}

    found = {number: decode_trajectory(records.read(number)) for number in records.committed(())}
    fresh = starts[-1].next_ticket_at(fence)
    survivors, again = split_tickets(taken, state, fresh, complete_groups(found.values()))
    # Counted, but not freed: a node hears at the next turn what it is to free, and a kill may come in between.
    left = [n for n, each in found.items() if each.ticket in again or trajectory_identity(each) in known]
    there = {trajectory_identity(each) for n, each in found.items() if n not in left}
    lost = episode_log.roll_back(folder, closed, there)
    records.acknowledge(left)

    incarnation = max(state.restart_epoch, starts[-1].restart_epoch + 1)
    adopted = sum(taken[ticket] == TICKET_DONE for ticket in survivors)
    log.info(
        "incarnation %d goes on from version %d: %d groups in flight, %d adopted, %d to be made again; "
        "%d episodes of the job are rolled back",
        incarnation, state.version, len(survivors) - adopted, adopted, len(again), len(lost),
    )  # fmt: skip
    start = TicketEpoch(incarnation, state.version, fence + 1, again, fresh)
    by_life = Counter(line["worker"] for line in [*counted, *lost])
    return ResumePoint(start, starts, survivors, before, by_life, len(lost))


def ticket_claims(starts: Sequence[TicketEpoch], claims: Sequence[str], end: int) -> dict[int, str]:
    """What became of each ticket that a job has issued: who signed it last, DONE, or FENCE for nobody.

    owners: signatures of the positions from the first start on, below `end`, where the counter stands.
    """
    found: dict[int, str] = {}
    for number, start in enumerate(starts):
        found |= dict.fromkeys(start.open_tickets, TICKET_FENCE)  # unless their positions were taken
        fence = starts[number + 1].first_slot - 1 if number + 1 < len(starts) else end
        for position in range(start.first_slot, fence):
            found[start.ticket_at(position)] = claims[position - starts[0].first_slot]
    return found


def complete_groups(trajectories: Iterable[Trajectory]) -> set[int]:
    """Tickets all of whose episodes are there."""
    indices: dict[int, set[int]] = defaultdict(set)
    sizes: dict[int, int] = {}
    for each in trajectories:
        indices[each.ticket].add(each.index)
        sizes[each.ticket] = each.group_size
    return {ticket for ticket, there in indices.items() if len(there) == sizes[ticket]}


def split_tickets(
    claims: Mapping[int, str], state: TrainerState, first_new_ticket: int, complete: Container[int]
) -> tuple[frozenset[int], tuple[int, ...]]:
    """The tickets that survive, and those to be run again, in order: all below `fresh` that `state` has not closed."""
    known = state.closed_tickets + len(state.open_tickets)
    candidates = {*state.open_tickets, *range(known, first_new_ticket)}
    survivors = set()
    for ticket in candidates:
        owner = claims.get(ticket, TICKET_FENCE)
        if owner not in (TICKET_DONE, TICKET_FENCE) or (owner == TICKET_DONE and ticket in complete):
            survivors.add(ticket)
    return frozenset(survivors), tuple(sorted(candidates - survivors))
