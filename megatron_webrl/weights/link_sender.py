"""Sending side of a transfer over one link."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import TransferLink
from megatron_webrl.weights.link_channels import error_summary
from megatron_webrl.weights.link_transfer import (
    FAILURE_CHECK_SECONDS,
    LinkTransfer,
    TransferAborted,
    TransferUnits,
    message_tags,
)
from megatron_webrl.weights.slices import Slice, TransferMessage, box_index

_CONFIRMATION_POLL_SECONDS = (0.001, 0.05)  # least and most between two polls for the receivers' confirmation
_CONFIRMATION_POLL_FRACTION = 1 / 64  # poll interval as a fraction of the transfer's time so far, within the limits


@dataclass
class OutgoingMessages:
    """Messages that one trainer rank sends over one link in a transfer."""

    link: TransferLink
    messages: Sequence[TransferMessage]  # of this rank, in link order
    link_rank_by_receiver: Mapping[int, int]  # link rank by engine rank


class LinkSender(LinkTransfer):
    """Send one transfer over a link: all messages, then wait for the receivers' confirmation."""

    def __init__(
        self,
        outgoing: OutgoingMessages,
        units: TransferUnits,
        source: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        transfer: int,
        seconds: float,
        wakeup: threading.Event,
        peer_failure: Callable[[str], str | None] | None,
        verify: bool,
    ) -> None:
        super().__init__(outgoing.link, units, dtype, transfer, seconds, verify)
        self.source, self.link_rank_by_receiver = source, outgoing.link_rank_by_receiver
        self.wakeup, self.peer_failure = wakeup, peer_failure
        self.tags = message_tags(units.messages, transfer)
        self.checksums: dict[int, list[int]] = {receiver: [] for receiver in outgoing.link_rank_by_receiver.values()}
        self.finished = False
        self.failure: str | None = None
        self.awaiting_confirmation = False
        self.started_at, self.next_confirmation_check = time.monotonic(), 0.0

    def run_guarded(self, step: Callable[[], bool]) -> bool:
        """Run a step; a TransferAborted ends only this link's transfer. Returns whether there was progress."""
        try:
            return step()
        except TransferAborted as error:
            self.finished = True
            self.failure = str(self.link.fail(f"transfer {self.transfer}: {error}"))
            return True

    def announce(self) -> bool:
        if self.link.process_group is None:
            self.finished, self.failure = True, f"link {self.link.name} cannot be used: {self.link.close_reason}"
            return True
        self.start(self.wakeup)
        trainer = self.messages[0].sender if self.messages else -1
        self.link.store.set(f"begin/{self.link.rank}", f"{self.transfer} {trainer} {int(self.verify)}")
        return True

    def poll(self) -> bool:
        """Process completed messages and post the next ones. Returns whether there was progress."""
        return self._confirm() if self.awaiting_confirmation else self._deliver()

    def seconds_to_next_poll(self) -> float:
        """Longest wait until the next poll if no completion sets `wakeup`."""
        return (
            max(self.next_confirmation_check - time.monotonic(), 0.0)
            if self.awaiting_confirmation
            else self.link.channel.poll_seconds
        )

    def _deliver(self) -> bool:
        count, error = self.link.channel.completed()
        moved = count > self.completed
        if moved:
            for number in range(self.completed, count):
                self.release(number)
            self.completed = count
            self.record_progress()
        self._post_sends()
        if self.completed == len(self.messages):
            self._publish_checksums()
            self.awaiting_confirmation = True
            return True
        message = self.messages[self.completed]
        peer = self.link_rank_by_receiver[message.receiver]
        what = f"message {self.completed + 1} of {len(self.messages)} to {self.link.describe_rank(peer)}"
        if error is not None:
            raise TransferAborted(f"{what}: {error}")
        if not moved:
            self._check_peer(peer, what)
        return moved

    def _confirm(self) -> bool:
        now = time.monotonic()
        if now < self.next_confirmation_check:
            return False
        link, ranks = self.link, list(self.link_rank_by_receiver.values())
        completed = link.store.multi_get([f"done/{rank}" for rank in ranks])  # set when a rank joins
        # A rank that receives nothing may be ahead.
        missing = [rank for rank, transfer in zip(ranks, completed, strict=True) if int(transfer) < self.transfer]
        if not missing:
            self._delete_checksums()
            link.last_completed = self.transfer
            self.finished = True
            return True
        low, high = _CONFIRMATION_POLL_SECONDS
        self.next_confirmation_check = now + min(max((now - self.started_at) * _CONFIRMATION_POLL_FRACTION, low), high)
        self._check_peer(missing[0], "the confirmation of " + ", ".join(map(link.describe_rank, missing)))
        return False

    def _check_peer(self, peer: int, what: str) -> None:
        if time.monotonic() - self.last_failure_check >= FAILURE_CHECK_SECONDS and self.peer_failure is not None:
            failure = self.peer_failure(self.link.name)
            if failure is not None:
                raise TransferAborted(f"{what}: {failure}")
        self.check_peer(peer, what)

    def _post_sends(self) -> None:
        while self.can_post():
            number = self.posted
            message = self.messages[number]
            peer = self.link_rank_by_receiver[message.receiver]
            data = self._packed(number, message)
            if data is None:
                return
            if self.verify:
                start = 0
                for piece in message.slices:
                    self.checksums[peer].append(checksum(data[start : start + piece.elements]))
                    start += piece.elements
            try:
                self.link.channel.send(data, peer, self.tags[number])
            except RuntimeError as error:
                what = f"message {number + 1} of {len(self.messages)} to {self.link.describe_rank(peer)}"
                raise TransferAborted(f"{what}: {error_summary(error)}") from error
            self.mark_posted()

    def _packed(self, number: int, message: TransferMessage) -> torch.Tensor | None:
        """Flat data of a message: a view of the parameter if contiguous, else staging; None while no buffer is free."""
        boxes = [self._box(piece) for piece in message.slices]
        view = self.contiguous_view(boxes)
        if view is not None:
            return view
        data = self.allocate_staging(number)
        if data is None:
            return None
        start = 0
        for piece, box in zip(message.slices, boxes, strict=True):
            data[start : start + piece.elements].view(piece.size).copy_(box)
            start += piece.elements
        return data

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.source(piece.source_param).detach()[box_index(piece.source_offset, piece.size)]

    def _publish_checksums(self) -> None:
        if self.verify:
            for to, sums in self.checksums.items():
                self.link.store.set(f"sums/{self.transfer}/{self.link.rank}/{to}", struct.pack(f"<{len(sums)}Q", *sums))

    def _delete_checksums(self) -> None:
        if self.verify:
            for peer in self.checksums:
                self.link.store.delete_key(f"sums/{self.transfer}/{self.link.rank}/{peer}")
