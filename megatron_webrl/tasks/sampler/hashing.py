"""Hash-driven random numbers and permutations, alike on all machines."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 6


@lru_cache(maxsize=64)
def label_key(seed: int, label: str) -> int:
    """A 64-bit key of a seed and a label."""
    return int.from_bytes(hashlib.blake2b(f"{label}/{seed}".encode(), digest_size=8).digest(), "big")


def mix(value: int) -> int:
    """SplitMix64's output function: 64 bits to 64 bits, one to one."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def number(key: int, index: int) -> int:
    """The index-th 64-bit number of the stream `key`."""
    return mix(key + (index + 1) * _GOLDEN)


def fraction(key: int, index: int) -> float:
    """The index-th number of the stream `key`, as a float within [0, 1)."""
    return (number(key, index) >> 11) * 2.0**-53


def fractions(key: int, first: int, count: int) -> np.ndarray:
    """`fraction` of the indices from `first` on: float64 [count]."""
    with np.errstate(over="ignore"):
        values = np.uint64(key & _MASK) + np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values ^= values >> np.uint64(31)
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permuted(key: int, index: int, count: int) -> int:
    """Element `index % count` of a permutation of range(count) that depends on `key` and on the pass, index // count.

    A Feistel network over the next power of four, applied until the result is below `count` (cycle walking): constant
    memory, fewer than four applications on average.
    """
    passes, value = divmod(index, count)
    stream = number(key, passes)
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix(stream + (turn << 40) + right) & mask)
        value = left << half | right
        if value < count:
            return value
