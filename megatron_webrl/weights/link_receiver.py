"""Receiving side of a transfer over one link."""

from __future__ import annotations

import struct
import threading
from typing import Protocol

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import TransferLink
from megatron_webrl.weights.link_channels import error_summary, poll_until
from megatron_webrl.weights.link_transfer import LinkTransfer, TransferAborted, TransferUnits, message_tags
from megatron_webrl.weights.slices import Slice, TransferMessage, box_index

_MAX_POLL_PAUSE = 0.02  # seconds


class WeightTarget(Protocol):
    """Destination of an engine rank's slices."""

    def tensor(self, parameter: str) -> torch.Tensor:
        """Parameter to write slices into. Requested as late as possible; may be allocated on first use."""

    def mark_written(self, parameter: str, elements: int) -> None:
        """Report that `elements` more elements of the parameter have been written."""


class LinkReceiver(LinkTransfer):
    """Receive one transfer over a link: wait for announcements, receive all messages, compare checksums."""

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
        self.receive_buffers: dict[int, torch.Tensor] = {}  # by message number
        self.checksums: dict[int, list[int]] = {}

    def run(self) -> None:
        """Receive the whole transfer. Raises TransferAborted."""
        self.start(self.wakeup)
        if self.messages:
            self._await_announcements()
        self._post_receives()
        while self.completed < len(self.messages):
            self.wakeup.clear()
            if not self._step():
                self.wakeup.wait(self.link.channel.poll_seconds)
        if self.link.parameter_device.type == "cuda":  # the engine may read its weights on another stream
            torch.cuda.current_stream(self.link.parameter_device).synchronize()
        if self.verify:
            self._compare_checksums()
        self.link.store.set(f"done/{self.link.rank}", str(self.transfer))
        self.link.last_completed = self.transfer

    def _await_announcements(self) -> None:
        """Wait until every trainer rank of the link has announced this transfer; map trainer ranks to link ranks."""
        num_senders = self.link.rank - self.messages[0].receiver

        def announced() -> bool:
            absent = [rank for rank in range(num_senders) if not self._is_announced(rank)]
            if absent:
                self.check_peer(absent[0], f"the announcement of {', '.join(map(self.link.describe_rank, absent))}")
            return not absent

        poll_until(announced, max_pause=_MAX_POLL_PAUSE)
        unknown = {message.sender for message in self.messages} - set(self.link_rank_by_sender)
        if unknown:
            raise TransferAborted(
                f"no rank of this link is trainer rank {sorted(unknown)}; they are {sorted(self.link_rank_by_sender)}"
            )

    def _is_announced(self, rank: int) -> bool:
        key = f"begin/{rank}"
        if rank in self.link_rank_by_sender.values():
            return True
        if not self.link.store.check([key]):
            return False
        transfer, trainer, sums = map(int, self.link.store.get(key).split())
        if transfer == self.link.last_completed:
            return False  # announcement of the previous transfer
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
            self._post_receives()
        if moved:
            self.record_progress()
        elif self.completed < len(self.messages):
            peer = self.link_rank_by_sender[self.messages[self.completed].sender]
            what = f"message {self.completed + 1} of {len(self.messages)} from {self.link.describe_rank(peer)}"
            if error is not None:
                raise TransferAborted(f"{what}: {error}")
            self.check_peer(peer, what)
        return moved

    def _post_receives(self) -> None:
        while self.can_post():
            number = self.posted
            message = self.messages[number]
            data = self._destination(number, message)
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

    def _destination(self, number: int, message: TransferMessage) -> torch.Tensor | None:
        """Flat buffer for a message: the parameter itself if contiguous, else staging; None while no buffer is free."""
        if len({piece.target_param for piece in message.slices}) == 1:
            view = self.contiguous_view([self._box(piece) for piece in message.slices])
            if view is not None:
                return view
        return self.allocate_staging(number)

    def _unpack(self, number: int) -> None:
        data, staged = self.receive_buffers.pop(number), number in self.slot_of_message
        message = self.messages[number]
        start = 0
        for piece in message.slices:
            if staged:
                self._box(piece).copy_(data[start : start + piece.elements].view(piece.size))
                start += piece.elements
            if self.verify:
                written = checksum(self._box(piece).to(self.dtype))
                self.checksums.setdefault(self.link_rank_by_sender[message.sender], []).append(written)
            self.target.mark_written(piece.target_param, piece.elements)
        self.release(number)

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.target.tensor(piece.target_param).detach()[box_index(piece.target_offset, piece.size)]

    def _compare_checksums(self) -> None:
        """Compare checksums of the written slices with the senders'. Raises TransferAborted for the first mismatch."""
        for trainer, peer in self.link_rank_by_sender.items():
            mine = self.checksums.get(peer)
            if mine is None:
                continue
            theirs = self._sender_checksums(peer)
            pieces = [piece for message in self.messages if message.sender == trainer for piece in message.slices]
            for piece, written, sent in zip(pieces, mine, theirs, strict=True):
                if written != sent:
                    receiver, sender = map(self.link.describe_rank, (self.link.rank, peer))
                    raise TransferAborted(
                        f"checksum of {piece.hf_param} in {piece.target_param} is {written:016x} on {receiver},"
                        f" {sent:016x} in {piece.source_param} on {sender}"
                    )

    def _sender_checksums(self, peer: int) -> tuple[int, ...]:
        key = f"sums/{self.transfer}/{peer}/{self.link.rank}"

        def published() -> bool:
            found = bool(self.link.store.check([key]))
            if not found:
                self.check_peer(peer, f"the checksums of {self.link.describe_rank(peer)}")
            return found

        poll_until(published, max_pause=_MAX_POLL_PAUSE)
        data = self.link.store.get(key)
        return struct.unpack(f"<{len(data) // 8}Q", data)
