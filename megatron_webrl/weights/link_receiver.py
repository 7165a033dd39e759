"""One link's part of a transfer on an engine rank."""

from __future__ import annotations

import struct
import threading
from typing import Protocol

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import TransferLink, error_summary, poll_until
from megatron_webrl.weights.link_transfer import LinkTransfer, TransferAborted, TransferUnits, message_tags
from megatron_webrl.weights.slices import Slice, TransferMessage, box_index

_MAX_POLL_PAUSE = 0.02  # seconds


class WeightTarget(Protocol):
    """Where an engine rank's slices go."""

    def tensor(self, parameter: str) -> torch.Tensor:
        """The parameter that slices are written into; asked for as late as possible, it may be made on first use."""

    def mark_written(self, parameter: str, elements: int) -> None:
        """So many elements of the parameter have arrived."""


class LinkReceiver(LinkTransfer):
    """A transfer over one link on an engine rank: the senders' announcement, all messages, the checksums."""

    def __init__(
        self,
        link: TransferLink,
        units: TransferUnits,
        target: WeightTarget,
        dtype: torch.dtype,
        transfer: int,
        seconds: float,
        verify: bool,
    ) -> None:
        super().__init__(link, units, dtype, transfer, seconds, verify)
        self.target = target
        self.tags = message_tags(units.messages, transfer)
        self.wakeup = threading.Event()
        self.link_rank_by_sender: dict[int, int] = {}  # link rank of each trainer rank
        self.receive_buffers: dict[int, torch.Tensor] = {}  # by number: where to
        self.checksums: dict[int, list[int]] = {}

    def run(self) -> None:
        self.start(self.wakeup)
        if self.messages:
            self._meet()
        self._fill()
        while self.completed < len(self.messages):
            self.wakeup.clear()
            if not self._step():
                self.wakeup.wait(self.link.channel.poll_seconds)
        if self.link.device.type == "cuda":
            torch.cuda.current_stream(self.link.device).synchronize()
        if self.verify:
            self._compare()
        self.link.store.set(f"done/{self.link.rank}", str(self.transfer))
        self.link.last_completed = self.transfer

    def _meet(self) -> None:
        """Wait until every trainer rank of the link has announced this transfer; learn which rank each of them is."""
        engine_begins = self.link.rank - self.messages[0].receiver

        def announced() -> bool:
            absent = [rank for rank in range(engine_begins) if not self._begun(rank)]
            if absent:
                self.check_peer(absent[0], f"the announcement by {', '.join(map(self.link.describe_rank, absent))}")
            return not absent

        poll_until(announced, max_pause=_MAX_POLL_PAUSE)
        unknown = {message.sender for message in self.messages} - set(self.link_rank_by_sender)
        if unknown:
            raise TransferAborted(
                f"no rank of this link is trainer rank {sorted(unknown)}; they are {sorted(self.link_rank_by_sender)}"
            )

    def _begun(self, rank: int) -> bool:
        key = f"begin/{rank}"
        if rank in self.link_rank_by_sender.values():
            return True
        if not self.link.store.check([key]):
            return False
        transfer, trainer, sums = map(int, self.link.store.get(key).split())
        if transfer == self.link.last_completed:
            return False  # the last one's announcement
        if transfer != self.transfer:
            raise TransferAborted(
                f"{self.link.describe_rank(rank)} sends transfer {transfer}, this rank expects {self.transfer}"
            )
        if self.verify and not sums:
            raise TransferAborted(f"{self.link.describe_rank(rank)} sends no checksums, this rank wants them (verify)")
        self.link_rank_by_sender[trainer] = rank
        return True

    def _step(self) -> bool:
        count, error = self.link.channel.completed()
        moved = count > self.completed
        while self.completed < count:
            self._unpack(self.completed)
            self.completed += 1
            self._fill()
        if moved:
            self.record_progress()
        elif self.completed < len(self.messages):
            peer = self.link_rank_by_sender[self.messages[self.completed].sender]
            what = f"message {self.completed + 1} of {len(self.messages)} from {self.link.describe_rank(peer)}"
            if error is not None:
                raise TransferAborted(f"{what}: {error}")
            self.check_peer(peer, what)
        return moved

    def _fill(self) -> None:
        while self.can_post():
            number = self.posted
            message = self.messages[number]
            data = self._place(number, message)
            if data is None:
                return
            peer = self.link_rank_by_sender[message.sender]
            try:
                self.link.channel.receive(data, peer, self.tags[number])
            except RuntimeError as error:
                what = f"message {number + 1} of {len(self.messages)} from {self.link.describe_rank(peer)}"
                raise TransferAborted(f"{what}: {error_summary(error)}") from error
            self.receive_buffers[number] = data
            self.mark_posted()

    def _place(self, number: int, message: TransferMessage) -> torch.Tensor | None:
        """Where a message arrives, flat: the destination itself where that will do; None while no buffer is free."""
        if len({piece.target_param for piece in message.slices}) == 1:
            straight = self.contiguous_view([self._box(piece) for piece in message.slices])
            if straight is not None:
                return straight
        return self.allocate_staging(number)

    def _unpack(self, number: int) -> None:
        data, staged = self.receive_buffers.pop(number), number in self.slot_of_message
        message = self.messages[number]
        at = 0
        for piece in message.slices:
            if staged:
                self._box(piece).copy_(data[at : at + piece.elements].view(piece.size))
                at += piece.elements
            if self.verify:
                read = checksum(self._box(piece).to(self.dtype))
                self.checksums.setdefault(self.link_rank_by_sender[message.sender], []).append(read)
            self.target.mark_written(piece.target_param, piece.elements)
        self.release(number)

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.target.tensor(piece.target_param).detach()[box_index(piece.target_offset, piece.size)]

    def _compare(self) -> None:
        """Hold the checksums of what was written against the senders'. Raises GivenUp naming the first that differs."""
        for trainer, peer in self.link_rank_by_sender.items():
            mine = self.checksums.get(peer)
            if mine is None:
                continue
            theirs = self._sums_of(peer)
            pieces = [piece for message in self.messages if message.sender == trainer for piece in message.slices]
            for piece, read, sent in zip(pieces, mine, theirs, strict=True):
                if read != sent:
                    receiver, sender = map(self.link.describe_rank, (self.link.rank, peer))
                    raise TransferAborted(
                        f"checksum of {piece.hf_param} in {piece.target_param} is {read:016x} on {receiver},"
                        f" {sent:016x} in {piece.source_param} on {sender}"
                    )

    def _sums_of(self, peer: int) -> tuple[int, ...]:
        key = f"sums/{self.transfer}/{peer}/{self.link.rank}"

        def published() -> bool:
            found = bool(self.link.store.check([key]))
            if not found:
                self.check_peer(peer, f"the checksums of {self.link.describe_rank(peer)}")
            return found

        poll_until(published, max_pause=_MAX_POLL_PAUSE)
        data = self.link.store.get(key)
        return struct.unpack(f"<{len(data) // 8}Q", data)
