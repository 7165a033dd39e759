"""What both directions of a transfer have in common: units and a window of them, staging, waiting with a limit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.weights.link import Link
from megatron_webrl.weights.slices import Message, Slice

_ALONE_BYTES = 2**22
"""Slices from this size on travel alone: one that is contiguous needs no copy then."""
WINDOWS = (2, 4)
"""Least and most units of a link that a rank has under way, as the staging memory allows."""
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
        self.slot_bytes, self.window = units.bytes, units.window
        self.seconds, self.verify = seconds, verify
        self.posted = self.through = 0
        self.moved = self.looked = time.monotonic()
        self.noted = False

    def open(self, bell: threading.Event) -> None:
        if self.transfer <= self.link.completed:
            raise GivenUp(f"its number is not above {self.link.completed}, the last that this rank completed")
        self.link.wire.begin(bell, self.seconds)

    def staging(self, number: int) -> torch.Tensor:
        """The buffer of a message, flat, in the wire's type."""
        slot, buffers = number % self.window, self.link.buffers
        if slot not in buffers or buffers[slot].nbytes < self.slot_bytes:
            buffers.pop(slot, None)  # gone before the larger one is made
            buffers[slot] = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.link.device)
        elements = self.messages[number].elements
        return buffers[slot][: elements * self.dtype.itemsize].view(self.dtype)

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
    window: int  # how many are under way


def units_of(links: Sequence[Sequence[Message]], dtype: torch.dtype, staging_bytes: int) -> list[Units]:
    """Cut each link's messages into units, and share the staging memory out to the links.

    Both ends of a link cut alike. Raises ValueError where not even two units of every link fit.
    """
    found = []
    for messages in links:
        cut = [unit for message in messages for unit in _cut(message, dtype.itemsize)]
        found.append(Units(cut, max((unit.elements for unit in cut), default=0) * dtype.itemsize, WINDOWS[0]))
    need = sum(WINDOWS[0] * units.bytes for units in found)
    if need > staging_bytes:
        raise ValueError(
            f"what is under way on {len(links)} links takes up to {need} bytes, the limit is"
            f" staging_bytes={staging_bytes} (weights.bucket_mib): plan smaller messages or raise it"
        )
    for units in found:
        if units.bytes:
            units.window = min(WINDOWS[1], WINDOWS[0] + (staging_bytes - need) // len(found) // units.bytes)
    return found


def _cut(message: Message, item_bytes: int) -> Iterator[Message]:
    """Parts of a message between slices: large slices alone, small ones together with their neighbours."""
    together: list[Slice] = []
    for piece in message.slices:
        alone = piece.elements * item_bytes >= _ALONE_BYTES
        if together and alone:
            yield _unit(message, together)
            together = []
        together.append(piece)
        if alone:
            yield _unit(message, together)
            together = []
    if together:
        yield _unit(message, together)


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
