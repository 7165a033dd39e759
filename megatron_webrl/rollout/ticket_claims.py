"""Claim tickets for a worker: first those that an earlier instance of it, or a worker given up, left unfinished."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from megatron_webrl.control.control_plane import ControlClient, TicketEpoch, ticket_epoch_at

log = logging.getLogger(__name__)


class TicketClaims:
    """A worker's access to the ticket counter. Tickets are available once the trainer has started an epoch."""

    def __init__(self, control: ControlClient, engines: int) -> None:
        self._control, self._engines = control, engines  # that share the free tickets
        self._epochs: Sequence[TicketEpoch] = ()  # of the job, ascending
        self._unfinished: list[int] = []  # slots that an earlier instance claimed and did not close
        self._orphaned: list[tuple[int, str]] = []  # slots that workers given up did not close, and their worker
        self._given_up: set[str] = set()  # workers whose claims have been read

    @property
    def restart_epoch(self) -> int:
        """The newest restart epoch; only valid after a claim."""
        return self._epochs[-1].restart_epoch

    def claim(self, count: int) -> Iterator[tuple[int, int]]:
        """Claim up to `count` tickets, at most a share of the free ones; yields slot of the counter and ticket."""
        if not self._epochs and not self._load_epochs():
            return
        self._find_orphaned_slots()
        share = -(-self._control.free_slots() // self._engines)  # a fast worker has room again sooner, and claims more
        for _ in range(count):
            slot: int | None
            if self._unfinished:
                slot = self._unfinished.pop(0)
            elif (orphaned := self._adopt()) is not None:
                slot = orphaned
            elif share > 0:
                slot, share = self._control.claim_slot(), share - 1
            else:
                return
            if slot is None:
                return
            yield slot, self._ticket_at(slot)

    def _load_epochs(self) -> bool:
        epochs = self._control.ticket_epochs()
        if not epochs:
            return False
        self._epochs, self._unfinished = epochs, self._control.unfinished_claims(epochs[0].first_slot)
        if self._unfinished:
            log.info(
                "resuming %d groups that an earlier instance of this worker left unfinished", len(self._unfinished)
            )
        return True

    def _find_orphaned_slots(self) -> None:
        for worker in self._control.given_up_workers().keys() - self._given_up:
            slots = self._control.unfinished_claims(self._epochs[0].first_slot, worker)
            log.info("%s was given up and left %d groups unfinished, for the other workers", worker, len(slots))
            self._orphaned += [(slot, worker) for slot in slots]
            self._given_up.add(worker)

    def _adopt(self) -> int | None:
        """The next slot of a worker given up that no other worker has adopted."""
        while self._orphaned:
            slot, worker = self._orphaned.pop(0)
            if self._control.adopt_slot(slot, worker):
                return slot
        return None

    def _ticket_at(self, slot: int) -> int:
        if self._control.ticket_epoch_count() > len(self._epochs):  # the epoch of a slot is published before the slot
            self._epochs = self._control.ticket_epochs()
        return ticket_epoch_at(self._epochs, slot).ticket_at(slot)
