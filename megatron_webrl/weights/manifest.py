"""What a weight transfer carries: names, shapes and types in one agreed order, and how they fill buckets.

Example: with limit_bytes=1000, tensors of 600, 600 and 2000 bytes make the buckets
[600, 400 of 600], [200 of 600, 800 of 2000], [1000 of 2000], [200 of 2000].
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNMENT = 16  # every piece starts at a multiple, so that its bytes can be viewed as any type


@dataclass(frozen=True)
class Entry:
    """One tensor under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name} has type {self.dtype}; transfers carry {', '.join(ITEM_BYTES)}")

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Piece:
    """A run of bytes of one tensor within one bucket."""

    entry: int  # index in the manifest
    start: int  # byte within the tensor
    stop: int
    offset: int  # byte within the bucket


@dataclass(frozen=True)
class Bucket:
    """What one broadcast carries."""

    pieces: tuple[Piece, ...]
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The tensors of a transfer, in order. Sender and receivers must hold equal manifests."""

    entries: tuple[Entry, ...]

    @classmethod
    def from_list(cls, tensors: Iterable[tuple[str, Iterable[int], str]]) -> Manifest:
        """From (name, shape, dtype name) triples. Raises ValueError for a repeated name or an unknown type."""
        entries = tuple(Entry(name, tuple(int(size) for size in shape), dtype) for name, shape, dtype in tensors)
        seen: set[str] = set()
        for entry in entries:
            if entry.name in seen:
                raise ValueError(f"tensor {entry.name} is twice in the manifest")
            seen.add(entry.name)
        return cls(entries)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.bytes for entry in self.entries)

    def to_json(self) -> str:
        """A text that `from_json` reads back; equal manifests give equal texts."""
        return json.dumps(
            [[entry.name, list(entry.shape), entry.dtype] for entry in self.entries], separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what `to_json` wrote. Raises ValueError."""
        return cls.from_list((name, shape, dtype) for name, shape, dtype in json.loads(text))

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def digest(self) -> str:
        """64 hexadecimal digits; equal exactly for equal manifests."""
        return self._digest

    def buckets(self, limit_bytes: int) -> list[Bucket]:
        """Fill buckets of at most `limit_bytes` in order; a tensor may go over several. Raises ValueError."""
        if limit_bytes < ALIGNMENT:
            raise ValueError(f"a bucket of {limit_bytes} bytes is too small; give at least {ALIGNMENT}")
        limit = limit_bytes // ALIGNMENT * ALIGNMENT
        buckets: list[Bucket] = []
        pieces: list[Piece] = []
        used = 0
        for index, entry in enumerate(self.entries):
            start = 0
            while start < entry.bytes:
                if used >= limit:
                    buckets.append(Bucket(tuple(pieces), used))
                    pieces, used = [], 0
                stop = min(entry.bytes, start + limit - used)
                pieces.append(Piece(index, start, stop, used))
                used += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
                start = stop
        if pieces:
            buckets.append(Bucket(tuple(pieces), used))
        return buckets
