"""What both directions of a transfer have in common: units, staging, waiting with a limit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.weights.link import TransferLink
from megatron_webrl.weights.slices import Slice, TransferMessage

_ALONE_BYTES = 2**21
"""Runs of slices from this size on travel alone: one that is contiguous needs no copy then."""
STAGING_SLOTS = (2, 8)
"""Least and most staging buffers of a link on a rank, as the staging memory allows."""
MAX_IN_FLIGHT = 32
"""Most units of a link that a rank has under way, in as many bytes at most as all its staging buffers have."""
FAILURE_CHECK_SECONDS = 0.25
_TAG_BITS = 20  # of a message's number; the bits above hold the transfer's
_TRANSFERS = 2**10


class TransferAborted(Exception):
    """A peer failed, is late or is at odds with this rank."""


class LinkTransfer:
    """One rank's messages of one transfer over one link: what both directions have in common."""

    def __init__(
        self, link: TransferLink, units: TransferUnits, dtype: torch.dtype, transfer: int, seconds: float, verify: bool
    ) -> None:
        self.link, self.messages, self.dtype, self.transfer = link, units.messages, dtype, transfer
        self.slot_bytes, self.free_slots = units.max_bytes, list(range(units.staging_slots))
        self.max_in_flight_bytes = units.staging_slots * units.max_bytes  # under way
        self.slot_of_message: dict[int, int] = {}  # slot of each message under way that has one
        self.timeout_seconds, self.verify = seconds, verify
        self.posted = self.completed = self.in_flight_elements = 0  # messages; elements under way
        self.last_progress = self.last_failure_check = time.monotonic()
        self.wait_reported = False

    def start(self, bell: threading.Event) -> None:
        if self.transfer <= self.link.last_completed:
            raise TransferAborted(
                f"its number is not above {self.link.last_completed}, the last that this rank completed"
            )
        self.link.channel.start_transfer(bell, self.timeout_seconds)

    def can_post(self) -> bool:
        """Whether the next message may be put under way, as far as numbers go."""
        if self.posted == len(self.messages) or self.posted == self.completed + MAX_IN_FLIGHT:
            return False
        ahead = self.in_flight_elements + self.messages[self.posted].elements
        return ahead * self.dtype.itemsize <= self.max_in_flight_bytes

    def mark_posted(self) -> None:
        """The next message is."""
        self.in_flight_elements += self.messages[self.posted].elements
        self.posted += 1

    def allocate_staging(self, number: int) -> torch.Tensor | None:
        """A buffer for a message, flat, in the wire's type, until it is `settled`; None while all are in use."""
        if not self.free_slots:
            return None
        slot, buffers = self.free_slots.pop(), self.link.staging_buffers
        if slot not in buffers or buffers[slot].nbytes < self.slot_bytes:
            buffers.pop(slot, None)  # gone before the larger one is made
            buffers[slot] = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.link.device)
        self.slot_of_message[number] = slot
        elements = self.messages[number].elements
        return buffers[slot][: elements * self.dtype.itemsize].view(self.dtype)

    def release(self, number: int) -> None:
        """The message is through: nothing touches its buffer any more, if it had one."""
        self.in_flight_elements -= self.messages[number].elements
        if number in self.slot_of_message:
            self.free_slots.append(self.slot_of_message.pop(number))

    def contiguous_view(self, boxes: list[torch.Tensor]) -> torch.Tensor | None:
        """The boxes as one flat tensor without a copy, if they lie one after the other and as they travel."""
        first = boxes[0]
        if first.dtype != self.dtype or first.device != self.link.device:
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
        """Something came of the waiting: the limit counts from here."""
        self.last_progress = time.monotonic()
        if self.wait_reported:
            self.link.store.delete_key(f"waiting/{self.link.rank}")
            self.wait_reported = False

    def check_peer(self, peer: int, what: str) -> None:
        """While waiting for `peer`: see whether the link failed elsewhere, or the limit is reached."""
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
            raise TransferAborted(f"{what}: nothing within {self.timeout_seconds:g} s; {self._silent(peer)}")

    def _silent(self, peer: int) -> str:
        """Who holds everything up: a peer that itself waits for another is not to blame."""
        seen = [self.link.rank]
        while peer not in seen and self.link.store.check([f"waiting/{peer}"]):
            seen.append(peer)
            peer = int(self.link.store.get(f"waiting/{peer}"))
        return (
            f"{self.link.describe_rank(peer)} is silent" if peer not in seen else f"ranks {seen} wait for one another"
        )


@dataclass
class TransferUnits:
    """A link's messages as they travel."""

    messages: list[TransferMessage]
    max_bytes: int  # of the largest
    staging_slots: int  # staging buffers of that size


def split_into_units(
    links: Sequence[Sequence[TransferMessage]], dtype: torch.dtype, staging_bytes: int
) -> list[TransferUnits]:
    """Cut each link's messages into units, and share the staging memory out to the links.

    Both ends of a link cut alike. Raises ValueError where not even two units of every link fit.
    """
    found = []
    for messages in links:
        cut = [unit for message in messages for unit in _cut(message, dtype.itemsize)]
        found.append(
            TransferUnits(cut, max((unit.elements for unit in cut), default=0) * dtype.itemsize, STAGING_SLOTS[0])
        )
    need = sum(STAGING_SLOTS[0] * units.max_bytes for units in found)
    if need > staging_bytes:
        raise ValueError(
            f"what is under way on {len(links)} links takes up to {need} bytes, the limit is"
            f" staging_bytes={staging_bytes} (weights.bucket_mib): plan smaller messages or raise it"
        )
    for units in found:
        if units.max_bytes:
            units.staging_slots = min(
                STAGING_SLOTS[1], STAGING_SLOTS[0] + (staging_bytes - need) // len(found) // units.max_bytes
            )
    return found


def _cut(message: TransferMessage, item_bytes: int) -> Iterator[TransferMessage]:
    """Parts of a message between slices: large runs alone, small ones together with their neighbours."""
    together: list[Slice] = []
    for run in _runs(message.slices):
        alone = sum(piece.elements for piece in run) * item_bytes >= _ALONE_BYTES
        if together and alone:
            yield _unit(message, together)
            together = []
        together += run
        if alone:
            yield _unit(message, together)
            together = []
    if together:
        yield _unit(message, together)


def _runs(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Slices that follow each other along the first dimension of their target."""
    run: list[Slice] = []
    for piece in slices:
        if run and not _follows(run[-1], piece):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _follows(first: Slice, second: Slice) -> bool:
    """Whether the second box begins where the first ends in the same parameter, rows of the same form."""
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
    """Tag of each message: its number among those of its sender and receiver, which both count, and the transfer's."""
    seen: Counter[tuple[int, int]] = Counter()
    tags = []
    for message in messages:
        pair = (message.sender, message.receiver)
        tags.append((transfer % _TRANSFERS) << _TAG_BITS | seen[pair])
        seen[pair] += 1
    if seen and max(seen.values()) > 2**_TAG_BITS:
        raise ValueError(f"{max(seen.values())} messages from one rank to another; the limit is {2**_TAG_BITS}")
    return tags
