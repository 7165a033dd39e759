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

from megatron_webrl.control import DONE, FENCE, Control, Start
from megatron_webrl.ring.record import decode
from megatron_webrl.tracking import episode_log
from megatron_webrl.tracking.episode_log import identity, identity_of
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.beginning import Beginning
from megatron_webrl.trainer.checkpoint import TrainerState
from megatron_webrl.trainer.node_rings import NodeRings
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.trainer.sharing import OneRing, Records
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

_BEFORE = "accounting/before"  # episodes that were closed when the job began


def begin(control: Control, rings: OneRing | NodeRings, state: TrainerState, folder: Path, first: bool) -> Beginning:
    """Where the incarnation of `state` begins, which is a fresh run's or a checkpoint's. Collective.

    `first`: on the rank that talks. After a take-over nobody takes a ticket until the job is opened.
    """
    beginning = None
    if first and control.opened():
        beginning = _take_over(control, rings.records, state, folder)
    elif first:
        closed = Accounting.from_state(state.accounting).closed
        beginning = Beginning.first(state.incarnation, state.version, state.base, state.open_tickets, closed)
        control.put(_BEFORE, closed)
        episode_log.forget_rolled_back(folder)
    rings.end()
    shared = broadcast_object(beginning)
    assert shared is not None
    return shared


def _take_over(control: Control, records: Records, state: TrainerState, folder: Path) -> Beginning:
    fence, starts = control.fence(), control.starts()
    taken = statuses(starts, control.signatures(starts[0].first, fence), fence)  # before the rings
    closed, before = Accounting.from_state(state.accounting).closed, control.value(_BEFORE)
    assert isinstance(before, int)
    counted = episode_log.read(folder, before, closed)
    known = {identity(line) for line in counted}

    found = {number: decode(records.read(number)) for number in records.committed(())}
    fresh = starts[-1].fresh_at(fence)
    survivors, again = divide(taken, state, fresh, whole_groups(found.values()))
    # Counted, but not freed: a node hears at the next turn what it is to free, and a kill may come in between.
    left = [n for n, each in found.items() if each.ticket in again or identity_of(each) in known]
    there = {identity_of(each) for n, each in found.items() if n not in left}
    lost = episode_log.roll_back(folder, closed, there)
    records.acknowledge(left)

    incarnation = max(state.incarnation, starts[-1].incarnation + 1)
    adopted = sum(taken[ticket] == DONE for ticket in survivors)
    log.info(
        "incarnation %d goes on from version %d: %d groups in flight, %d adopted, %d to be made again; "
        "%d episodes of the job are rolled back",
        incarnation, state.version, len(survivors) - adopted, adopted, len(again), len(lost),
    )  # fmt: skip
    start = Start(incarnation, state.version, fence + 1, again, fresh)
    by_life = Counter(line["worker"] for line in [*counted, *lost])
    return Beginning(start, starts, survivors, before, by_life, len(lost))


def statuses(starts: Sequence[Start], owners: Sequence[str], end: int) -> dict[int, str]:
    """What became of each ticket that a job has issued: who signed it last, DONE, or FENCE for nobody.

    owners: signatures of the positions from the first start on, below `end`, where the counter stands.
    """
    found: dict[int, str] = {}
    for number, start in enumerate(starts):
        found |= dict.fromkeys(start.open_tickets, FENCE)  # unless their positions were taken
        fence = starts[number + 1].first - 1 if number + 1 < len(starts) else end
        for position in range(start.first, fence):
            found[start.ticket(position)] = owners[position - starts[0].first]
    return found


def whole_groups(trajectories: Iterable[Trajectory]) -> set[int]:
    """Tickets all of whose episodes are there."""
    indices: dict[int, set[int]] = defaultdict(set)
    sizes: dict[int, int] = {}
    for each in trajectories:
        indices[each.ticket].add(each.index)
        sizes[each.ticket] = each.group_size
    return {ticket for ticket, there in indices.items() if len(there) == sizes[ticket]}


def divide(
    taken: Mapping[int, str], state: TrainerState, fresh: int, whole: Container[int]
) -> tuple[frozenset[int], tuple[int, ...]]:
    """The tickets that survive, and those to be run again, in order: all below `fresh` that `state` has not closed."""
    known = state.base + len(state.open_tickets)
    candidates = {*state.open_tickets, *range(known, fresh)}
    survivors = set()
    for ticket in candidates:
        owner = taken.get(ticket, FENCE)
        if owner not in (DONE, FENCE) or (owner == DONE and ticket in whole):
            survivors.add(ticket)
    return frozenset(survivors), tuple(sorted(candidates - survivors))
