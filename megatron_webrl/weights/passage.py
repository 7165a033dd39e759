"""What both directions of a transfer have in common: units, staging, waiting with a limit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.weights.link import Link
from megatron_webrl.weights.slices import Message, Slice

_ALONE_BYTES = 2**21
"""Runs of slices from this size on travel alone: one that is contiguous needs no copy then."""
SLOTS = (2, 8)
"""Least and most staging buffers of a link on a rank, as the staging memory allows."""
UNDER_WAY = 32
"""Most units of a link that a rank has under way, in as many bytes at most as all its staging buffers have."""
FAILURE_LOOK_SECONDS = 0.25
_TAG_BITS = 20  # of a message's number; the bits above hold the transfer's
_TRANSFERS = 2**10


class GivenUp(Exception):
    """A peer failed, is late or is at odds with this rank."""


class Passage:
    """One rank's messages of one transfer over one link: what both directions have in common."""

    def __init__(
        self, link: Link, units: Units, dtype: torch.dtype, transfer: int, seconds: float, verify: bool
    ) -> None:
        self.link, self.messages, self.dtype, self.transfer = link, units.messages, dtype, transfer
        self.slot_bytes, self.free = units.bytes, list(range(units.slots))
        self.most_bytes = units.slots * units.bytes  # under way
        self.staged: dict[int, int] = {}  # slot of each message under way that has one
        self.seconds, self.verify = seconds, verify
        self.posted = self.through = self.flying = 0  # messages; elements under way
        self.moved = self.looked = time.monotonic()
        self.noted = False

    def open(self, bell: threading.Event) -> None:
        if self.transfer <= self.link.completed:
            raise GivenUp(f"its number is not above {self.link.completed}, the last that this rank completed")
        self.link.wire.begin(bell, self.seconds)

    def has_room(self) -> bool:
        """Whether the next message may be put under way, as far as numbers go."""
        if self.posted == len(self.messages) or self.posted == self.through + UNDER_WAY:
            return False
        ahead = self.flying + self.messages[self.posted].elements
        return ahead * self.dtype.itemsize <= self.most_bytes

    def under_way(self) -> None:
        """The next message is."""
        self.flying += self.messages[self.posted].elements
        self.posted += 1

    def staging(self, number: int) -> torch.Tensor | None:
        """A buffer for a message, flat, in the wire's type, until it is `settled`; None while all are in use."""
        if not self.free:
            return None
        slot, buffers = self.free.pop(), self.link.buffers
        if slot not in buffers or buffers[slot].nbytes < self.slot_bytes:
            buffers.pop(slot, None)  # gone before the larger one is made
            buffers[slot] = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.link.device)
        self.staged[number] = slot
        elements = self.messages[number].elements
        return buffers[slot][: elements * self.dtype.itemsize].view(self.dtype)

    def settled(self, number: int) -> None:
        """The message is through: nothing touches its buffer any more, if it had one."""
        self.flying -= self.messages[number].elements
        if number in self.staged:
            self.free.append(self.staged.pop(number))

    def straight(self, boxes: list[torch.Tensor]) -> torch.Tensor | None:
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

    def progress(self) -> None:
        """Something came of the waiting: the limit counts from here."""
        self.moved = time.monotonic()
        if self.noted:
            self.link.store.delete_key(f"waiting/{self.link.rank}")
            self.noted = False

    def look(self, peer: int, what: str) -> None:
        """While waiting for `peer`: see whether the link failed elsewhere, or the limit is reached."""
        now = time.monotonic()
        waited = now - self.moved
        if now - self.looked >= FAILURE_LOOK_SECONDS:
            self.looked = now
            if self.link.first_failure() is not None:
                raise GivenUp(f"another rank failed while this one waited: {what}")
        if waited > self.seconds / 2 and not self.noted:
            self.link.store.set(f"waiting/{self.link.rank}", str(peer))
            self.noted = True
        if waited > self.seconds:
            raise GivenUp(f"{what}: nothing within {self.seconds:g} s; {self._silent(peer)}")

    def _silent(self, peer: int) -> str:
        """Who holds everything up: a peer that itself waits for another is not to blame."""
        seen = [self.link.rank]
        while peer not in seen and self.link.store.check([f"waiting/{peer}"]):
            seen.append(peer)
            peer = int(self.link.store.get(f"waiting/{peer}"))
        return f"{self.link.who(peer)} is silent" if peer not in seen else f"ranks {seen} wait for one another"


@dataclass
class Units:
    """A link's messages as they travel."""

    messages: list[Message]
    bytes: int  # of the largest
    slots: int  # staging buffers of that size


def units_of(links: Sequence[Sequence[Message]], dtype: torch.dtype, staging_bytes: int) -> list[Units]:
    """Cut each link's messages into units, and share the staging memory out to the links.

    Both ends of a link cut alike. Raises ValueError where not even two units of every link fit.
    """
    found = []
    for messages in links:
        cut = [unit for message in messages for unit in _cut(message, dtype.itemsize)]
        found.append(Units(cut, max((unit.elements for unit in cut), default=0) * dtype.itemsize, SLOTS[0]))
    need = sum(SLOTS[0] * units.bytes for units in found)
    if need > staging_bytes:
        raise ValueError(
            f"what is under way on {len(links)} links takes up to {need} bytes, the limit is"
            f" staging_bytes={staging_bytes} (weights.bucket_mib): plan smaller messages or raise it"
        )
    for units in found:
        if units.bytes:
            units.slots = min(SLOTS[1], SLOTS[0] + (staging_bytes - need) // len(found) // units.bytes)
    return found


def _cut(message: Message, item_bytes: int) -> Iterator[Message]:
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
    stacked = len(first.target_place) - len(first.size)
    return (
        first.target == second.target
        and first.size[1:] == second.size[1:]
        and first.target_place[:stacked] == second.target_place[:stacked]
        and first.target_place[stacked + 1 :] == second.target_place[stacked + 1 :]
        and first.target_place[stacked] + first.size[0] == second.target_place[stacked]
    )


def _unit(message: Message, slices: list[Slice]) -> Message:
    return Message(message.sender, message.receiver, tuple(slices), sum(piece.elements for piece in slices))


def tags_of(messages: Sequence[Message], transfer: int) -> list[int]:
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
