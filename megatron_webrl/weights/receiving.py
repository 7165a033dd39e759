"""One link's part of a transfer on an engine rank."""

from __future__ import annotations

import struct
import threading
import time
from typing import Protocol

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import Link, plain
from megatron_webrl.weights.passage import GivenUp, Passage, Units, tags_of
from megatron_webrl.weights.slices import Message, Slice, index

_LONGEST_MEETING_PAUSE = 0.02  # seconds


class Target(Protocol):
    """Where an engine rank's slices go."""

    def tensor(self, parameter: str) -> torch.Tensor:
        """The parameter that slices are written into; asked for as late as possible, it may be made on first use."""

    def written(self, parameter: str, elements: int) -> None:
        """So many elements of the parameter have arrived."""


class Receiving(Passage):
    """A transfer over one link on an engine rank: the senders' announcement, all messages, the checksums."""

    def __init__(
        self,
        link: Link,
        units: Units,
        target: Target,
        dtype: torch.dtype,
        transfer: int,
        seconds: float,
        verify: bool,
    ) -> None:
        super().__init__(link, units, dtype, transfer, seconds, verify)
        self.target = target
        self.tags = tags_of(units.messages, transfer)
        self.bell = threading.Event()
        self.senders: dict[int, int] = {}  # link rank of each trainer rank
        self.arriving: dict[int, torch.Tensor] = {}  # by number: where to
        self.sums: dict[int, list[int]] = {}

    def run(self) -> None:
        self.open(self.bell)
        if self.messages:
            self._meet()
        self._fill()
        while self.through < len(self.messages):
            self.bell.clear()
            if not self._step():
                self.bell.wait(self.link.wire.pause)
        if self.link.device.type == "cuda":
            torch.cuda.current_stream(self.link.device).synchronize()
        if self.verify:
            self._compare()
        self.link.store.set(f"done/{self.link.rank}", str(self.transfer))
        self.link.completed = self.transfer

    def _meet(self) -> None:
        """Wait until every trainer rank of the link has announced this transfer; learn which rank each of them is."""
        engine_begins = self.link.rank - self.messages[0].receiver
        pause = 0.001
        while absent := [rank for rank in range(engine_begins) if not self._begun(rank)]:
            self.look(absent[0], f"the announcement by {', '.join(map(self.link.who, absent))}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_MEETING_PAUSE)
        unknown = {message.sender for message in self.messages} - set(self.senders)
        if unknown:
            raise GivenUp(f"no rank of this link is trainer rank {sorted(unknown)}; they are {sorted(self.senders)}")

    def _begun(self, rank: int) -> bool:
        key = f"begin/{rank}"
        if rank in self.senders.values():
            return True
        if not self.link.store.check([key]):
            return False
        transfer, trainer, sums = map(int, self.link.store.get(key).split())
        if transfer == self.link.completed:
            return False  # the last one's announcement
        if transfer != self.transfer:
            raise GivenUp(f"{self.link.who(rank)} sends transfer {transfer}, this rank expects {self.transfer}")
        if self.verify and not sums:
            raise GivenUp(f"{self.link.who(rank)} sends no checksums, this rank wants them (verify)")
        self.senders[trainer] = rank
        return True

    def _step(self) -> bool:
        count, error = self.link.wire.finished()
        moved = count > self.through
        while self.through < count:
            self._unpack(self.through)
            self.through += 1
            self._fill()
        if moved:
            self.progress()
        elif self.through < len(self.messages):
            peer = self.senders[self.messages[self.through].sender]
            what = f"message {self.through + 1} of {len(self.messages)} from {self.link.who(peer)}"
            if error is not None:
                raise GivenUp(f"{what}: {error}")
            self.look(peer, what)
        return moved

    def _fill(self) -> None:
        while self.has_room():
            number = self.posted
            message = self.messages[number]
            data = self._place(number, message)
            if data is None:
                return
            peer = self.senders[message.sender]
            try:
                self.link.wire.receive(data, peer, self.tags[number])
            except RuntimeError as error:
                raise GivenUp(
                    f"message {number + 1} of {len(self.messages)} from {self.link.who(peer)}: {plain(error)}"
                ) from error
            self.arriving[number] = data
            self.under_way()

    def _place(self, number: int, message: Message) -> torch.Tensor | None:
        """Where a message arrives, flat: the destination itself where that will do; None while no buffer is free."""
        if len({piece.target for piece in message.slices}) == 1:
            straight = self.straight([self._box(piece) for piece in message.slices])
            if straight is not None:
                return straight
        return self.staging(number)

    def _unpack(self, number: int) -> None:
        data, staged = self.arriving.pop(number), number in self.staged
        message = self.messages[number]
        at = 0
        for piece in message.slices:
            if staged:
                self._box(piece).copy_(data[at : at + piece.elements].view(piece.size))
                at += piece.elements
            if self.verify:
                read = checksum(self._box(piece).to(self.dtype))
                self.sums.setdefault(self.senders[message.sender], []).append(read)
            self.target.written(piece.target, piece.elements)
        self.settled(number)

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.target.tensor(piece.target).detach()[index(piece.target_place, piece.size)]

    def _compare(self) -> None:
        """Hold the checksums of what was written against the senders'. Raises GivenUp naming the first that differs."""
        for trainer, peer in self.senders.items():
            mine = self.sums.get(peer)
            if mine is None:
                continue
            theirs = self._sums_of(peer)
            pieces = [piece for message in self.messages if message.sender == trainer for piece in message.slices]
            for piece, read, sent in zip(pieces, mine, theirs, strict=True):
                if read != sent:
                    raise GivenUp(
                        f"checksum of {piece.name} in {piece.target} is {read:016x} on {self.link.who(self.link.rank)},"
                        f" {sent:016x} in {piece.source} on {self.link.who(peer)}"
                    )

    def _sums_of(self, peer: int) -> tuple[int, ...]:
        key = f"sums/{self.transfer}/{peer}/{self.link.rank}"
        pause = 0.001
        while not self.link.store.check([key]):
            self.look(peer, f"the checksums of {self.link.who(peer)}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_MEETING_PAUSE)
        data = self.link.store.get(key)
        return struct.unpack(f"<{len(data) // 8}Q", data)
