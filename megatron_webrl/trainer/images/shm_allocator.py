"""Shared memory without a name, given out in blocks: it is gone with the last process that holds it."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left

import numpy as np

ALIGNMENT = 64


class SharedMemoryAllocator:
    """One process gives blocks out and takes them back; others are told where they lie and write into them.

    Memory is taken from the machine as blocks are first written, the lowest first, and stays until the end.
    """

    def __init__(self, size: int) -> None:
        """`size` in bytes, rounded up."""
        self.size = aligned_size(size)
        self.fd = os.memfd_create("webrl-pixels")
        os.ftruncate(self.fd, self.size)
        self._memory = mmap.mmap(self.fd, self.size)
        self._free = [(0, self.size)]  # (offset, size), rising, no two of them adjacent

    @property
    def used_bytes(self) -> int:
        """Bytes given out."""
        return self.size - sum(size for _, size in self._free)

    def allocate(self, size: int) -> int | None:
        """The offset of a block of `size` bytes; None if there is no room for it in one piece."""
        size = aligned_size(size)
        for place, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[place : place + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def free(self, offset: int, size: int) -> None:
        """Take a block back, or the end of one that begins at a multiple of ALIGNMENT."""
        size = aligned_size(size)
        place = bisect_left(self._free, (offset, 0))
        before, after = self._free[:place], self._free[place:]
        if before and sum(before[-1]) == offset:
            offset, _ = start = before.pop()
            size += start[1]
        if after and offset + size == after[0][0]:
            size += after.pop(0)[1]
        self._free = [*before, (offset, size), *after]

    def view(self, offset: int, size: int) -> np.ndarray:
        """A view of a block: uint8 [size]."""
        return np.frombuffer(self._memory, np.uint8, size, offset)

    def close(self) -> None:
        """Let go of it; views stay valid as memory."""
        os.close(self.fd)


def aligned_size(size: int) -> int:
    """The bytes that a block of `size` takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT
