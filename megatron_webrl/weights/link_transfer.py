"""Common part of both directions of a transfer: units, staging buffers, waiting with a timeout."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.weights.link import TransferLink
from megatron_webrl.weights.slices import Slice, TransferMessage

_SEPARATE_BYTES = 2**21  # runs of slices from this size are sent alone, so that a contiguous run needs no copy
STAGING_SLOTS = (2, 8)  # least and most staging buffers per link and rank, as staging memory allows
MAX_IN_FLIGHT = 32  # messages per link and rank; their bytes are also limited to those of all staging buffers
FAILURE_CHECK_SECONDS = 0.25
_TAG_BITS = 20  # of the message number; the higher bits hold the transfer number
_TAG_TRANSFERS = 2**10


class TransferAborted(Exception):
    """A peer failed, timed out or disagrees with this rank."""


class LinkTransfer:
    """One rank's messages of one transfer over one link; base of sender and receiver."""

    def __init__(
        self, link: TransferLink, units: TransferUnits, dtype: torch.dtype, transfer: int, seconds: float, verify: bool
    ) -> None:
        self.link, self.messages, self.dtype, self.transfer = link, units.messages, dtype, transfer
        self.slot_bytes, self.free_slots = units.max_bytes, list(range(units.staging_slots))
        self.max_in_flight_bytes = units.staging_slots * units.max_bytes
        self.slot_of_message: dict[int, int] = {}  # staging slot of each staged message in flight
        self.timeout_seconds, self.verify = seconds, verify
        self.posted = self.completed = self.in_flight_elements = 0  # messages, messages, elements
        self.last_progress = self.last_failure_check = time.monotonic()
        self.wait_reported = False

    def start(self, wakeup: threading.Event) -> None:
        """Start the transfer. Raises TransferAborted if its number is not above the last completed one."""
        if self.transfer <= self.link.last_completed:
            raise TransferAborted(
                f"its number is not above {self.link.last_completed}, the last one that this rank completed"
            )
        self.link.channel.start_transfer(wakeup, self.timeout_seconds)

    def can_post(self) -> bool:
        """Whether the limits on messages and bytes in flight allow the next message."""
        if self.posted == len(self.messages) or self.posted == self.completed + MAX_IN_FLIGHT:
            return False
        in_flight = self.in_flight_elements + self.messages[self.posted].elements
        return in_flight * self.dtype.itemsize <= self.max_in_flight_bytes

    def mark_posted(self) -> None:
        self.in_flight_elements += self.messages[self.posted].elements
        self.posted += 1

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

    def contiguous_view(self, boxes: list[torch.Tensor]) -> torch.Tensor | None:
        """Flat view of the boxes if they are adjacent in memory and have the messages' dtype and device, else None."""
        first, device = boxes[0], self.link.message_device
        if first.dtype != self.dtype or first.device != device or self.link.parameter_device != device:
            return None
        end = first.data_ptr()
        for box in boxes:
            if box.data_ptr() != end or not box.is_contiguous():
                return None
            end += box.nbytes
        if len(boxes) == 1:
            return first.view(-1)
        if len({box.untyped_storage().data_ptr() for box in boxes}) > 1:
            return None
        return first.as_strided((sum(box.numel() for box in boxes),), (1,))

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
class TransferUnits:
    """Messages of a link after splitting, and its staging buffers."""

    messages: list[TransferMessage]
    max_bytes: int  # of the largest message
    staging_slots: int  # number of buffers of that size


def split_into_units(
    links: Sequence[Sequence[TransferMessage]], dtype: torch.dtype, staging_bytes: int
) -> list[TransferUnits]:
    """Split each link's messages into units and divide the staging memory over the links.

    Both ends of a link split in the same way. Raises ValueError unless two units of every link fit.
    """
    all_units = []
    for messages in links:
        cut = [unit for message in messages for unit in _cut(message, dtype.itemsize)]
        all_units.append(
            TransferUnits(cut, max((unit.elements for unit in cut), default=0) * dtype.itemsize, STAGING_SLOTS[0])
        )
    need = sum(STAGING_SLOTS[0] * units.max_bytes for units in all_units)
    if need > staging_bytes:
        raise ValueError(
            f"messages in flight on {len(links)} links take up to {need} bytes, more than"
            f" staging_bytes={staging_bytes} (weights.bucket_mib): plan smaller messages or raise it"
        )
    for units in all_units:
        if units.max_bytes:
            units.staging_slots = min(
                STAGING_SLOTS[1], STAGING_SLOTS[0] + (staging_bytes - need) // len(all_units) // units.max_bytes
            )
    return all_units


def _cut(message: TransferMessage, item_bytes: int) -> Iterator[TransferMessage]:
    """Split a message between slices: large runs alone, small runs merged with their neighbours."""
    merged: list[Slice] = []
    for run in _runs(message.slices):
        separate = sum(piece.elements for piece in run) * item_bytes >= _SEPARATE_BYTES
        if merged and separate:
            yield _unit(message, merged)
            merged = []
        merged += run
        if separate:
            yield _unit(message, merged)
            merged = []
    if merged:
        yield _unit(message, merged)


def _runs(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Group slices that are consecutive along the first dimension of their target."""
    run: list[Slice] = []
    for piece in slices:
        if run and not _follows(run[-1], piece):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _follows(first: Slice, second: Slice) -> bool:
    """Whether the second box starts where the first ends in the same parameter, with rows of the same shape."""
    stacked = len(first.target_offset) - len(first.size)
    return (
        first.target_param == second.target_param
        and first.size[1:] == second.size[1:]
        and first.target_offset[:stacked] == second.target_offset[:stacked]
        and first.target_offset[stacked + 1 :] == second.target_offset[stacked + 1 :]
        and first.target_offset[stacked] + first.size[0] == second.target_offset[stacked]
    )


def _unit(message: TransferMessage, slices: list[Slice]) -> TransferMessage:
    return TransferMessage(message.sender, message.receiver, tuple(slices), sum(piece.elements for piece in slices))


def message_tags(messages: Sequence[TransferMessage], transfer: int) -> list[int]:
    """Tag of each message: the transfer number and the message's index among those of its sender and receiver."""
    seen: Counter[tuple[int, int]] = Counter()
    tags = []
    for message in messages:
        pair = (message.sender, message.receiver)
        tags.append((transfer % _TAG_TRANSFERS) << _TAG_BITS | seen[pair])
        seen[pair] += 1
    if seen and max(seen.values()) > 2**_TAG_BITS:
        raise ValueError(f"{max(seen.values())} messages from one rank to another; the limit is {2**_TAG_BITS}")
    return tags
