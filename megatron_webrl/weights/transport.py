"""Weight transfer over links: a trainer rank sends to all its engines at once, an engine rank receives its slices.

A link's messages are processed in order, several in flight: packing and unpacking overlap with sending. Contiguous
data of the transfer's dtype are not copied, so large slices are sent alone; other data pass through staging buffers.

A failing rank publishes its error in the link's store and closes the link, so the other ranks fail at once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_webrl.weights.link import TransferError, TransferLink, error_summary, join_link, poll_until, reject_link
from megatron_webrl.weights.slices import Slice, TransferMessage, box_index, checksum

__all__ = ["TransferError", "TransferLink", "checksum", "join_link", "reject_link"]

STAGING_SLOTS = (2, 8)  # least and most staging buffers per link and rank, as staging memory allows
MAX_IN_FLIGHT = 32  # messages per link and rank; their bytes are also limited to those of all staging buffers
FAILURE_CHECK_SECONDS = 0.25


class TransferAborted(Exception):
    """A peer failed, timed out or disagrees with this rank."""


class LinkTransfer:
    """One rank's messages of one transfer over one link; base of sender and receiver."""

    direction: str  # of the messages: "to" or "from"

    def __init__(
        self,
        link: TransferLink,
        messages: Sequence[TransferMessage],
        staging: Staging,
        dtype: torch.dtype,
        transfer: int,
        seconds: float,
        wakeup: threading.Event,
        verify: bool,
    ) -> None:
        self.link, self.messages, self.dtype, self.transfer = link, messages, dtype, transfer
        self.slot_bytes, self.free_slots = staging.max_bytes, list(range(staging.slots))
        self.max_in_flight_bytes = staging.slots * staging.max_bytes
        self.slot_of_message: dict[int, int] = {}  # staging slot of each staged message in flight
        self.timeout_seconds, self.verify = seconds, verify
        self.posted = self.completed = self.in_flight_elements = 0  # messages, messages, elements
        self.last_progress = self.last_failure_check = time.monotonic()
        self.wait_reported = False
        link.channel.start_transfer(wakeup, seconds)

    def can_post(self) -> bool:
        """Whether the limits on messages and bytes in flight allow the next message."""
        if self.posted == len(self.messages) or self.posted == self.completed + MAX_IN_FLIGHT:
            return False
        in_flight = self.in_flight_elements + self.messages[self.posted].elements
        return in_flight * self.dtype.itemsize <= self.max_in_flight_bytes

    def peer_of(self, message: TransferMessage) -> int:
        """Link rank of the other end of a message."""
        raise NotImplementedError

    def buffer(self, number: int) -> torch.Tensor | None:
        """Flat data of a message to post; None while no staging buffer is free."""
        raise NotImplementedError

    def complete(self, number: int) -> None:
        """Use a message that has arrived."""

    def describe(self, number: int) -> str:
        """A message, for errors."""
        peer = self.link.describe_rank(self.peer_of(self.messages[number]))
        return f"message {number + 1} of {len(self.messages)} {self.direction} {peer}"

    def post(self, operation: Callable[[torch.Tensor, int], None]) -> None:
        """Post as many messages as the limits allow."""
        while self.can_post() and (data := self.buffer(self.posted)) is not None:
            message = self.messages[self.posted]
            try:
                operation(data, self.peer_of(message))
            except RuntimeError as error:
                raise TransferAborted(f"{self.describe(self.posted)}: {error_summary(error)}") from error
            self.in_flight_elements += message.elements
            self.posted += 1

    def advance(self, operation: Callable[[torch.Tensor, int], None]) -> bool:
        """Process completed messages and post the next ones. Returns whether there was progress."""
        self.post(operation)
        count, error = self.link.channel.completed()
        if count > self.completed:
            while self.completed < count:
                self.complete(self.completed)
                self.release(self.completed)
                self.completed += 1
                self.post(operation)
            self.record_progress()
            return True
        if self.completed < len(self.messages):
            what = self.describe(self.completed)
            if error is not None:
                raise TransferAborted(f"{what}: {error}")
            self.check_peer(self.peer_of(self.messages[self.completed]), what)
        return False

    def allocate_staging(self, number: int) -> torch.Tensor | None:
        """Flat staging buffer for a message until its `release`; None while all are in use."""
        if not self.free_slots:
            return None
        slot, buffers = self.free_slots.pop(), self.link.staging_buffers
        if slot not in buffers or buffers[slot].nbytes < self.slot_bytes:
            buffers.pop(slot, None)  # free it before allocating the larger one
            device, parameters = self.link.message_device, self.link.parameter_device
            pinned = (device.type, parameters.type) == ("cpu", "cuda")  # for the full speed of the GPU's bus
            buffers[slot] = torch.empty(self.slot_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.slot_of_message[number] = slot
        elements = self.messages[number].elements
        return buffers[slot][: elements * self.dtype.itemsize].view(self.dtype)

    def release(self, number: int) -> None:
        """Count a message as complete and free its staging buffer."""
        self.in_flight_elements -= self.messages[number].elements
        if number in self.slot_of_message:
            self.free_slots.append(self.slot_of_message.pop(number))

    def in_place_view(self, box: torch.Tensor) -> torch.Tensor | None:
        """Flat view of a box if it is contiguous, of the messages' dtype and on their device, else None."""
        device = self.link.message_device
        fits = box.dtype == self.dtype and box.device == device == self.link.parameter_device
        return box.view(-1) if fits and box.is_contiguous() else None

    def record_progress(self) -> None:
        """Restart the timeout after progress."""
        self.last_progress = time.monotonic()
        if self.wait_reported:
            self.link.store.delete_key(f"waiting/{self.link.rank}")
            self.wait_reported = False

    def check_peer(self, peer: int, what: str) -> None:
        """Raise TransferAborted if another rank failed or `peer` timed out."""
        now = time.monotonic()
        waited = now - self.last_progress
        if now - self.last_failure_check >= FAILURE_CHECK_SECONDS:
            self.last_failure_check = now
            if self.link.first_failure() is not None:
                raise TransferAborted(f"another rank failed while this one waited: {what}")
        if waited > self.timeout_seconds / 2 and not self.wait_reported:
            self.link.store.set(f"waiting/{self.link.rank}", str(peer))
            self.wait_reported = True
        if waited > self.timeout_seconds:
            raise TransferAborted(f"{what}: nothing within {self.timeout_seconds:g} s; {self._blame(peer)}")

    def _blame(self, peer: int) -> str:
        """Message naming the silent rank: a peer that itself waits for another rank is not to blame."""
        seen = [self.link.rank]
        while peer not in seen and self.link.store.check([f"waiting/{peer}"]):
            seen.append(peer)
            peer = int(self.link.store.get(f"waiting/{peer}"))
        return (
            f"{self.link.describe_rank(peer)} is silent" if peer not in seen else f"ranks {seen} wait for one another"
        )


@dataclass
class Staging:
    """Staging buffers of a rank for one link."""

    max_bytes: int  # of the largest message
    slots: int  # number of buffers of that size


def divide_staging(links: Sequence[Sequence[TransferMessage]], dtype: torch.dtype, staging_bytes: int) -> list[Staging]:
    """Divide the staging memory over the links, if any. Raises ValueError unless two messages of every link fit."""
    least, most = STAGING_SLOTS
    largest = [max((message.elements for message in messages), default=0) * dtype.itemsize for messages in links]
    need = least * sum(largest)
    if need > staging_bytes:
        raise ValueError(
            f"messages in flight on {len(links)} links take up to {need} bytes, more than"
            f" staging_bytes={staging_bytes} (weights.bucket_mib): plan smaller messages or raise it"
        )
    more = (staging_bytes - need) // max(len(links), 1)
    return [Staging(size, min(most, least + more // size) if size else least) for size in largest]


_CONFIRMATION_POLL_SECONDS = 0.01  # between two polls for the receivers' confirmation


class LinkSender(LinkTransfer):
    """Send one transfer over a link: all messages, then wait for the receivers' confirmation."""

    direction = "to"

    def __init__(
        self, source: Callable[[str], torch.Tensor], peer_failure: Callable[[str], str | None] | None, *arguments: Any
    ) -> None:
        """`source`, `peer_failure`: as in `send`; `arguments`: those of LinkTransfer."""
        super().__init__(*arguments)
        self.source, self.peer_failure = source, peer_failure
        self.receivers = range(len(self.link.senders), self.link.size)  # link ranks
        self.checksums: dict[int, list[int]] = {receiver: [] for receiver in self.receivers}
        self.finished = False
        self.failure: str | None = None
        self.awaiting_confirmation = False
        self.next_confirmation_check = 0.0

    def poll_guarded(self) -> bool:
        """`poll`; a TransferAborted ends only this link's transfer. Returns whether there was progress."""
        try:
            return self.poll()
        except TransferAborted as error:
            self.finished = True
            self.failure = str(self.link.fail(f"transfer {self.transfer}: {error}"))
            return True

    def peer_of(self, message: TransferMessage) -> int:
        """Link rank of the receiver."""
        return self.receivers[message.receiver]

    def poll(self) -> bool:
        """Process completed messages and post the next ones. Returns whether there was progress."""
        if self.awaiting_confirmation:
            return self._confirm()
        moved = self.advance(self.link.channel.send)
        if self.completed < len(self.messages):
            return moved
        if self.verify:
            for to, sums in self.checksums.items():
                self.link.store.set(f"sums/{self.transfer}/{self.link.rank}/{to}", json.dumps(sums))
        self.awaiting_confirmation = True
        return True

    def seconds_to_next_poll(self) -> float:
        """Longest wait until the next poll if no completion sets `wakeup`."""
        if self.awaiting_confirmation:
            return max(self.next_confirmation_check - time.monotonic(), 0.0)
        return self.link.channel.poll_seconds

    def _confirm(self) -> bool:
        now = time.monotonic()
        if now < self.next_confirmation_check:
            return False
        link, receivers = self.link, self.receivers
        completed = link.store.multi_get([f"done/{rank}" for rank in receivers])  # set when a rank joins
        # A rank that receives nothing may be ahead.
        missing = [rank for rank, transfer in zip(receivers, completed, strict=True) if int(transfer) < self.transfer]
        if not missing:
            if self.verify:
                for peer in self.checksums:
                    link.store.delete_key(f"sums/{self.transfer}/{link.rank}/{peer}")
            self.finished = True
            return True
        self.next_confirmation_check = now + _CONFIRMATION_POLL_SECONDS
        self.check_peer(missing[0], "the confirmation of " + ", ".join(map(link.describe_rank, missing)))
        return False

    def check_peer(self, peer: int, what: str) -> None:
        """Also raise TransferAborted if the receivers' engine is known to have failed."""
        due = time.monotonic() - self.last_failure_check >= FAILURE_CHECK_SECONDS
        if due and self.peer_failure is not None and (failure := self.peer_failure(self.link.name)) is not None:
            raise TransferAborted(f"{what}: {failure}")
        super().check_peer(peer, what)

    def buffer(self, number: int) -> torch.Tensor | None:
        """Flat data of a message: a view of the parameter if contiguous, else staging; None while no buffer is free."""
        message = self.messages[number]
        data = self.in_place_view(self._box(message.slices[0])) if len(message.slices) == 1 else None
        if data is None:
            data, start = self.allocate_staging(number), 0
            if data is None:
                return None
            for piece in message.slices:
                data[start : start + piece.elements].view(piece.size).copy_(self._box(piece))
                start += piece.elements
        if self.verify:
            parts = data.split([piece.elements for piece in message.slices])
            self.checksums[self.peer_of(message)] += map(checksum, parts)
        return data

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.source(piece.source_param).detach()[box_index(piece.source_offset, piece.size)]


_MAX_POLL_PAUSE = 0.02  # seconds


class LinkReceiver(LinkTransfer):
    """Receive one transfer over a link: all messages, then compare checksums and confirm."""

    direction = "from"

    def __init__(self, target: Any, *arguments: Any) -> None:
        """`target`: as in `receive`; `arguments`: those of LinkTransfer."""
        super().__init__(*arguments)
        self.target = target
        self.receive_buffers: dict[int, torch.Tensor] = {}  # by message number
        self.checksums: dict[int, list[int]] = {}

    def run(self, wakeup: threading.Event) -> None:
        """Receive the whole transfer. Raises TransferAborted."""
        while self.completed < len(self.messages):
            wakeup.clear()
            if not self.advance(self.link.channel.receive):
                wakeup.wait(self.link.channel.poll_seconds)
        if self.link.parameter_device.type == "cuda":  # the engine may read its weights on another stream
            torch.cuda.current_stream(self.link.parameter_device).synchronize()
        if self.verify:
            self._compare_checksums()
        self.link.store.set(f"done/{self.link.rank}", str(self.transfer))

    def peer_of(self, message: TransferMessage) -> int:
        """Link rank of the sender."""
        return self.link.senders.index(message.sender)

    def buffer(self, number: int) -> torch.Tensor | None:
        """Flat buffer for a message: the parameter itself if contiguous, else staging; None while no buffer is free."""
        slices = self.messages[number].slices
        data = self.in_place_view(self._box(slices[0])) if len(slices) == 1 else None
        data = self.allocate_staging(number) if data is None else data
        if data is not None:
            self.receive_buffers[number] = data
        return data

    def complete(self, number: int) -> None:
        """Copy a staged message to its parameters; report and, if asked, verify what is written."""
        data, staged = self.receive_buffers.pop(number), number in self.slot_of_message
        message, start = self.messages[number], 0
        for piece in message.slices:
            if staged:
                self._box(piece).copy_(data[start : start + piece.elements].view(piece.size))
                start += piece.elements
            if self.verify:
                written = checksum(self._box(piece).to(self.dtype))
                self.checksums.setdefault(self.peer_of(message), []).append(written)
            self.target.mark_written(piece.target_param, piece.elements)

    def _box(self, piece: Slice) -> torch.Tensor:
        return self.target.tensor(piece.target_param).detach()[box_index(piece.target_offset, piece.size)]

    def _compare_checksums(self) -> None:
        """Compare checksums of the written slices with the senders'. Raises TransferAborted for the first mismatch."""
        for peer, own in self.checksums.items():
            received = [message for message in self.messages if self.peer_of(message) == peer]
            pieces = [piece for message in received for piece in message.slices]
            for piece, written, sent in zip(pieces, own, self._sender_checksums(peer), strict=True):
                if written != sent:
                    receiver, sender = map(self.link.describe_rank, (self.link.rank, peer))
                    raise TransferAborted(
                        f"checksum of {piece.hf_param} in {piece.target_param} is {written:016x} on {receiver},"
                        f" {sent:016x} in {piece.source_param} on {sender}"
                    )

    def _sender_checksums(self, peer: int) -> list[int]:
        key = f"sums/{self.transfer}/{peer}/{self.link.rank}"

        def published() -> bool:
            found = self.link.store.check([key])
            if not found:
                self.check_peer(peer, f"the checksums of {self.link.describe_rank(peer)}")
            return found

        poll_until(published, max_pause=_MAX_POLL_PAUSE)
        sums: list[int] = json.loads(self.link.store.get(key))
        return sums


def send(
    transfers: Sequence[tuple[TransferLink, Sequence[TransferMessage]]],
    source: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    staging_bytes: int,
    transfer: int,
    timeout_seconds: float,
    peer_failure: Callable[[str], str | None] | None = None,
    verify: bool = False,
) -> dict[str, str | None]:
    """Send this rank's messages of each link, in link order, over all links at once; a failed link delays no other.

    A trainer rank has no link if it holds nothing that the engines of the transfer need from it.
    Slices are sent as `dtype`; staging buffers take at most `staging_bytes` over all links. `transfer` increases from
    call to call. `timeout_seconds` limits each wait for a peer; `peer_failure(link name)` may report a dead peer
    earlier. The first messages are packed before the receivers are ready. With `verify` receivers compare checksums.

    Returns the error of each link by name, None for success; a failed link is closed. After the return nothing reads
    the source. Raises ValueError for messages that do not fit, and exceptions of `source` (all links are closed then),
    but not for a peer's failure.
    """
    staging = divide_staging([messages for _, messages in transfers], dtype, staging_bytes)
    wakeup = threading.Event()
    common = dtype, transfer, timeout_seconds, wakeup, verify
    senders = [LinkSender(source, peer_failure, *one, of, *common) for one, of in zip(transfers, staging, strict=True)]
    try:
        while waiting := [sender for sender in senders if not sender.finished]:
            wakeup.clear()
            progress = [sender.poll_guarded() for sender in waiting]
            if not any(progress):
                wakeup.wait(min(sender.seconds_to_next_poll() for sender in waiting))
    except BaseException as error:
        for sender in senders:
            if not sender.finished:
                sender.link.fail(f"transfer {transfer}: {type(error).__name__}: {error_summary(error)}")
        raise
    return {sender.link.name: sender.failure for sender in senders}


def receive(
    link: TransferLink,
    messages: Sequence[TransferMessage],
    target: Any,
    dtype: torch.dtype,
    staging_bytes: int,
    transfer: int,
    timeout_seconds: float,
    verify: bool = False,
) -> None:
    """Receive this rank's messages of a link, in link order, into `target`, such as ModelTarget of vllm_target.py.

    Its tensor(parameter), the memory to write to, is called as late as possible, and mark_written(parameter, elements)
    after each slice.
    `timeout_seconds` limits each wait for a peer. With `verify` slices are read back and their checksums compared.
    Raises ValueError for messages that do not fit, and TransferError for other errors; the link is closed then.
    """
    (staging,), wakeup = divide_staging([messages], dtype, staging_bytes), threading.Event()
    try:
        LinkReceiver(target, link, messages, staging, dtype, transfer, timeout_seconds, wakeup, verify).run(wakeup)
    except TransferAborted as error:
        raise link.fail(f"transfer {transfer}: {error}") from error
    except BaseException as error:
        failure = link.fail(f"transfer {transfer}: {type(error).__name__}: {error_summary(error)}")
        if isinstance(error, Exception):
            raise failure from error
        raise
