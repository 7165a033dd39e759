"""Allocates blocks of anonymous shared memory, which ends with the last process that holds it."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left

import numpy as np

ALIGNMENT = 64


class SharedMemoryAllocator:
    """One process allocates, others write at its offsets; the kernel commits memory at first write and keeps it."""

    def __init__(self, size: int) -> None:
        """`size` in bytes, rounded up to ALIGNMENT."""
        self.size = aligned_size(size)
        self.fd = os.memfd_create("webrl-pixels")
        os.ftruncate(self.fd, self.size)
        self._memory = mmap.mmap(self.fd, self.size)
        self._free = [(0, self.size)]  # (offset, size), ascending, never adjacent

    @property
    def used_bytes(self) -> int:
        """Allocated bytes."""
        return self.size - sum(size for _, size in self._free)

    def allocate(self, size: int) -> int | None:
        """The offset of a block of `size` bytes; None if no free block is large enough."""
        size = aligned_size(size)
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def free(self, offset: int, size: int) -> None:
        """Free a block, or the end of one from a multiple of ALIGNMENT on."""
        size = aligned_size(size)
        index = bisect_left(self._free, (offset, 0))
        before, after = self._free[:index], self._free[index:]
        if before and sum(before[-1]) == offset:
            offset, preceding = before.pop()
            size += preceding
        if after and offset + size == after[0][0]:
            size += after.pop(0)[1]
        self._free = [*before, (offset, size), *after]

    def view(self, offset: int, size: int) -> np.ndarray:
        """A view of a block: uint8 [size]."""
        return np.frombuffer(self._memory, np.uint8, size, offset)

    def close(self) -> None:
        """Close the descriptor; views stay valid."""
        os.close(self.fd)


def aligned_size(size: int) -> int:
    """The bytes that a block of `size` occupies."""
    return -(-size // ALIGNMENT) * ALIGNMENT
