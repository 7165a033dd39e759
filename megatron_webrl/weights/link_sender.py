"""One link's part of a transfer on a trainer rank."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import TransferLink, error_summary
from megatron_webrl.weights.link_transfer import (
    FAILURE_CHECK_SECONDS,
    LinkTransfer,
    TransferAborted,
    TransferUnits,
    message_tags,
)
from megatron_webrl.weights.slices import Slice, TransferMessage, box_index

_DONE_LOOK_SECONDS = (0.001, 0.05)  # least and most between two looks for the receivers' last word
_DONE_LOOK_SHARE = 1 / 64  # of the transfer's time so far, between those two: what the looking may add to it


@dataclass
class OutgoingMessages:
    """What one trainer rank sends over one link in a transfer."""

    link: TransferLink
    messages: Sequence[TransferMessage]  # this rank's, in the link's order
    link_rank_by_receiver: Mapping[int, int]  # link rank of each of the engine's ranks


class LinkSender(LinkTransfer):
    """A transfer over one link on a trainer rank: first all messages, then the receivers' word that they are done."""

    def __init__(
        self,
        outgoing: OutgoingMessages,
        units: TransferUnits,
        source: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        transfer: int,
        seconds: float,
        bell: threading.Event,
        watch: Callable[[str], str | None] | None,
        verify: bool,
    ) -> None:
        super().__init__(outgoing.link, units, dtype, transfer, seconds, verify)
        self.source, self.link_rank_by_receiver, self.wakeup, self.peer_failure = (
            source,
            outgoing.link_rank_by_receiver,
            bell,
            watch,
        )
        self.tags = message_tags(units.messages, transfer)
        self.checksums: dict[int, list[int]] = {receiver: [] for receiver in outgoing.link_rank_by_receiver.values()}
        self.finished = False
        self.failure: str | None = None
        self.awaiting_confirmation = False
        self.started_at, self.next_confirmation_check = time.monotonic(), 0.0

    def run_guarded(self, act: Callable[[], bool]) -> bool:
        """Do it; a link's failure ends this link's transfer and nothing else. True if something moved."""
        try:
            return act()
        except TransferAborted as error:
            self.finished = True
            self.failure = str(self.link.fail(f"transfer {self.transfer}: {error}"))
            return True

    def announce(self) -> bool:
        """Announce the transfer."""
        if self.link.process_group is None:
            self.finished, self.failure = True, f"link {self.link.name} cannot be used: {self.link.close_reason}"
            return True
        self.start(self.wakeup)
        trainer = self.messages[0].sender if self.messages else -1
        self.link.store.set(f"begin/{self.link.rank}", f"{self.transfer} {trainer} {int(self.verify)}")
        return True

    def poll(self) -> bool:
        """Take in what is complete, put under way what may follow. True if something moved."""
        return self._confirm() if self.awaiting_confirmation else self._deliver()

    def seconds_to_next_poll(self) -> float:
        """Seconds until this link wants to look again though no bell rang."""
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
        self._fill()
        if self.completed == len(self.messages):
            self._publish_sums()
            self.awaiting_confirmation = True
            return True
        message = self.messages[self.completed]
        peer = self.link_rank_by_receiver[message.receiver]
        what = f"message {self.completed + 1} of {len(self.messages)} to {self.link.describe_rank(peer)}"
        if error is not None:
            raise TransferAborted(f"{what}: {error}")
        if not moved:
            self._look(peer, what)
        return moved

    def _confirm(self) -> bool:
        now = time.monotonic()
        if now < self.next_confirmation_check:
            return False
        link, ranks = self.link, list(self.link_rank_by_receiver.values())
        said = link.store.multi_get([f"done/{rank}" for rank in ranks])  # each is there since the rank joined
        # A rank that receives nothing may be ahead.
        missing = [rank for rank, transfer in zip(ranks, said, strict=True) if int(transfer) < self.transfer]
        if not missing:
            self._clear_sums()
            link.last_completed = self.transfer
            self.finished = True
            return True
        least, most = _DONE_LOOK_SECONDS
        self.next_confirmation_check = now + min(max((now - self.started_at) * _DONE_LOOK_SHARE, least), most)
        self._look(missing[0], "the last word of " + ", ".join(map(link.describe_rank, missing)))
        return False

    def _look(self, peer: int, what: str) -> None:
        if time.monotonic() - self.last_failure_check >= FAILURE_CHECK_SECONDS and self.peer_failure is not None:
            word = self.peer_failure(self.link.name)
            if word is not None:
                raise TransferAborted(f"{what}: {word}")
        self.check_peer(peer, what)

    def _fill(self) -> None:
        while self.can_post():
            number = self.posted
            message = self.messages[number]
            peer = self.link_rank_by_receiver[message.receiver]
            data = self._packed(number, message)
            if data is None:
                return
            if self.verify:
                at = 0
                for piece in message.slices:
                    self.checksums[peer].append(checksum(data[at : at + piece.elements]))
                    at += piece.elements
            try:
                self.link.channel.send(data, peer, self.tags[number])
            except RuntimeError as error:
                what = f"message {number + 1} of {len(self.messages)} to {self.link.describe_rank(peer)}"
                raise TransferAborted(f"{what}: {error_summary(error)}") from error
            self.mark_posted()

    def _packed(self, number: int, message: TransferMessage) -> torch.Tensor | None:
        """The message's data, flat: the parameter's own memory where that will do; None while no buffer is free."""
        boxes = [self._box(piece) for piece in message.slices]
        straight = self.contiguous_view(boxes)
        if straight is not None:
            return straight
        data = self.allocate_staging(number)
        if data is None:
            return None
        at = 0
        for piece, box in zip(message.slices, boxes, strict=True):
            data[at : at + piece.elements].view(piece.size).copy_(box)
            at += piece.elements
        return data

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.source(piece.source_param).detach()[box_index(piece.source_offset, piece.size)]

    def _publish_sums(self) -> None:
        if self.verify:
            for peer, sums in self.checksums.items():
                self.link.store.set(
                    f"sums/{self.transfer}/{self.link.rank}/{peer}", struct.pack(f"<{len(sums)}Q", *sums)
                )

    def _clear_sums(self) -> None:
        if self.verify:
            for peer in self.checksums:
                self.link.store.delete_key(f"sums/{self.transfer}/{self.link.rank}/{peer}")
