"""Claim tickets for a worker: first those that an earlier instance of it left unfinished."""

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

    @property
    def restart_epoch(self) -> int:
        """The newest restart epoch; only valid after a claim."""
        return self._epochs[-1].restart_epoch

    def claim(self, count: int) -> Iterator[tuple[int, int]]:
        """Claim up to `count` tickets, at most a share of the free ones; yields slot of the counter and ticket."""
        if not self._epochs and not self._load_epochs():
            return
        share = -(-self._control.free_slots() // self._engines)  # a fast worker has room again sooner, and claims more
        for _ in range(count):
            slot: int | None
            if self._unfinished:
                slot = self._unfinished.pop(0)
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

    def _ticket_at(self, slot: int) -> int:
        if self._control.ticket_epoch_count() > len(self._epochs):  # the epoch of a slot is published before the slot
            self._epochs = self._control.ticket_epochs()
        return ticket_epoch_at(self._epochs, slot).ticket_at(slot)
