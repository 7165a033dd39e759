"""One link's part of a transfer on a trainer rank."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import Link, plain
from megatron_webrl.weights.passage import FAILURE_LOOK_SECONDS, GivenUp, Passage, Units, tags_of
from megatron_webrl.weights.slices import Message, Slice, index

_DONE_LOOK_SECONDS = (0.001, 0.05)  # least and most between two looks for the receivers' last word
_DONE_LOOK_SHARE = 1 / 64  # of the transfer's time so far, between those two: what the looking may add to it


@dataclass
class Outgoing:
    """What one trainer rank sends over one link in a transfer."""

    link: Link
    messages: Sequence[Message]  # this rank's, in the link's order
    ranks: Mapping[int, int]  # link rank of each of the engine's ranks


class Sending(Passage):
    """A transfer over one link on a trainer rank: first all messages, then the receivers' word that they are done."""

    def __init__(
        self,
        outgoing: Outgoing,
        units: Units,
        source: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        transfer: int,
        seconds: float,
        bell: threading.Event,
        watch: Callable[[str], str | None] | None,
        verify: bool,
    ) -> None:
        super().__init__(outgoing.link, units, dtype, transfer, seconds, verify)
        self.source, self.ranks, self.bell, self.watch = source, outgoing.ranks, bell, watch
        self.tags = tags_of(units.messages, transfer)
        self.sums: dict[int, list[int]] = {receiver: [] for receiver in outgoing.ranks.values()}
        self.over = False
        self.result: str | None = None
        self.confirming = False
        self.began, self.done_look = time.monotonic(), 0.0

    def attempt(self, act: Callable[[], bool]) -> bool:
        """Do it; a link's failure ends this link's transfer and nothing else. True if something moved."""
        try:
            return act()
        except GivenUp as error:
            self.over = True
            self.result = str(self.link.fail(f"transfer {self.transfer}: {error}"))
            return True

    def begin(self) -> bool:
        """Announce the transfer."""
        if self.link.process_group is None:
            self.over, self.result = True, f"link {self.link.name} cannot be used: {self.link.closed_because}"
            return True
        self.open(self.bell)
        trainer = self.messages[0].sender if self.messages else -1
        self.link.store.set(f"begin/{self.link.rank}", f"{self.transfer} {trainer} {int(self.verify)}")
        return True

    def step(self) -> bool:
        """Take in what is complete, put under way what may follow. True if something moved."""
        return self._confirm() if self.confirming else self._deliver()

    def pause(self) -> float:
        """Seconds until this link wants to look again though no bell rang."""
        return max(self.done_look - time.monotonic(), 0.0) if self.confirming else self.link.wire.pause

    def _deliver(self) -> bool:
        count, error = self.link.wire.finished()
        moved = count > self.through
        if moved:
            for number in range(self.through, count):
                self.settled(number)
            self.through = count
            self.progress()
        self._fill()
        if self.through == len(self.messages):
            self._publish_sums()
            self.confirming = True
            return True
        message = self.messages[self.through]
        peer = self.ranks[message.receiver]
        what = f"message {self.through + 1} of {len(self.messages)} to {self.link.who(peer)}"
        if error is not None:
            raise GivenUp(f"{what}: {error}")
        if not moved:
            self._look(peer, what)
        return moved

    def _confirm(self) -> bool:
        now = time.monotonic()
        if now < self.done_look:
            return False
        link, ranks = self.link, list(self.ranks.values())
        said = link.store.multi_get([f"done/{rank}" for rank in ranks])  # each is there since the rank joined
        # A rank that receives nothing may be ahead.
        missing = [rank for rank, transfer in zip(ranks, said, strict=True) if int(transfer) < self.transfer]
        if not missing:
            self._clear_sums()
            link.completed = self.transfer
            self.over = True
            return True
        least, most = _DONE_LOOK_SECONDS
        self.done_look = now + min(max((now - self.began) * _DONE_LOOK_SHARE, least), most)
        self._look(missing[0], "the last word of " + ", ".join(map(link.who, missing)))
        return False

    def _look(self, peer: int, what: str) -> None:
        if time.monotonic() - self.looked >= FAILURE_LOOK_SECONDS and self.watch is not None:
            word = self.watch(self.link.name)
            if word is not None:
                raise GivenUp(f"{what}: {word}")
        self.look(peer, what)

    def _fill(self) -> None:
        while self.has_room():
            number = self.posted
            message = self.messages[number]
            peer = self.ranks[message.receiver]
            data = self._packed(number, message)
            if data is None:
                return
            if self.verify:
                at = 0
                for piece in message.slices:
                    self.sums[peer].append(checksum(data[at : at + piece.elements]))
                    at += piece.elements
            try:
                self.link.wire.send(data, peer, self.tags[number])
            except RuntimeError as error:
                raise GivenUp(
                    f"message {number + 1} of {len(self.messages)} to {self.link.who(peer)}: {plain(error)}"
                ) from error
            self.under_way()

    def _packed(self, number: int, message: Message) -> torch.Tensor | None:
        """The message's data, flat: the parameter's own memory where that will do; None while no buffer is free."""
        boxes = [self._box(piece) for piece in message.slices]
        straight = self.straight(boxes)
        if straight is not None:
            return straight
        data = self.staging(number)
        if data is None:
            return None
        at = 0
        for piece, box in zip(message.slices, boxes, strict=True):
            data[at : at + piece.elements].view(piece.size).copy_(box)
            at += piece.elements
        return data

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.source(piece.source).detach()[index(piece.source_place, piece.size)]

    def _publish_sums(self) -> None:
        if self.verify:
            for peer, sums in self.sums.items():
                self.link.store.set(
                    f"sums/{self.transfer}/{self.link.rank}/{peer}", struct.pack(f"<{len(sums)}Q", *sums)
                )

    def _clear_sums(self) -> None:
        if self.verify:
            for peer in self.sums:
                self.link.store.delete_key(f"sums/{self.transfer}/{self.link.rank}/{peer}")
