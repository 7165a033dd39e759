"""Read a ring's usage without attaching, which would keep it from being swept; its words are of different moments."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from megatron_webrl.ring.ring import ALIGNMENT, COMMITTED, DESCRIPTOR_OFFSET, RESERVED, RingUsage
from megatron_webrl.ring.segment import (
    CAPACITY_OFFSET,
    FIRST_OFFSET,
    FORMAT_VERSION,
    FORMAT_VERSION_OFFSET,
    MAGIC,
    NEXT_OFFSET,
    SHM_FOLDER,
    SLOT_BYTES,
    SLOT_TABLE_OFFSET,
    SLOTS_OFFSET,
)


def read_ring_usage(name: str) -> RingUsage | None:
    """The usage of a ring; None if there is no ring of this name, or one of another format."""
    path: Path = SHM_FOLDER / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _usage(descriptor)
    except struct.error:  # shorter than a ring: still being created
        return None
    finally:
        os.close(descriptor)


def _usage(descriptor: int) -> RingUsage | None:
    if _word(descriptor, 0) != MAGIC or _word(descriptor, FORMAT_VERSION_OFFSET) != FORMAT_VERSION:
        return None
    capacity, slots = _word(descriptor, CAPACITY_OFFSET), _word(descriptor, SLOTS_OFFSET)
    first, following = _word(descriptor, FIRST_OFFSET), _word(descriptor, NEXT_OFFSET)
    numbers = range(first, max(first, following))
    states = [_word(descriptor, _slot(number, slots)) for number in numbers]
    kinds = [word % 4 for number, word in zip(numbers, states, strict=True) if word // 4 == number]
    used = 0
    if numbers:
        tail, _ = _place(descriptor, _slot(numbers[0], slots))
        start, length = _place(descriptor, _slot(numbers[-1], slots))
        used = min(max(0, -(-(start + length) // ALIGNMENT) * ALIGNMENT - tail), capacity)
    return RingUsage(used, capacity, kinds.count(COMMITTED), kinds.count(RESERVED))


def _slot(number: int, slots: int) -> int:
    return SLOT_TABLE_OFFSET + number % slots * SLOT_BYTES


def _word(descriptor: int, at: int) -> int:
    value: int = struct.unpack("=Q", os.pread(descriptor, 8, at))[0]
    return value


def _place(descriptor: int, slot: int) -> tuple[int, int]:
    """A record's start, as a position that never wraps, and its length in bytes."""
    start, length = struct.unpack("=2Q", os.pread(descriptor, 16, slot + DESCRIPTOR_OFFSET))
    return start, length
