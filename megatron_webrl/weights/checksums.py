"""Tensor checksums that depend only on the bytes and their order, not on device or shape."""

from __future__ import annotations

import torch

_WORD = 8  # bytes
_MASK = 2**64 - 1
_CHUNK_WORDS = {"cpu": 2**15, "cuda": 2**22}  # fits the cache; a GPU needs few large steps


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


# Odd constants with evenly spread bits: the golden ratio, then the multipliers of splitmix64's finaliser.
_POSITION_FACTOR = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of the tensor's bytes in row-major order, of any shape. Swapped values change it."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    size = data.numel()
    words, rest = divmod(size, _WORD)
    if data.storage_offset() % _WORD:
        data = data.clone()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if words:
        whole = data[: words * _WORD].view(torch.int64)
        length = min(words, _CHUNK_WORDS[data.device.type])
        position_terms = torch.arange(length, dtype=torch.int64, device=data.device).mul_(_POSITION_FACTOR)
        for start in range(0, words, length):
            part = whole[start : start + length]
            total += _mixed_sum(part, position_terms[: part.numel()], start)
    if rest:
        last = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
        last[:rest] = data[words * _WORD :]
        total += _mixed_sum(last.view(torch.int64), torch.zeros(1, dtype=torch.int64, device=data.device), words)
    return (int(total) ^ (size * _POSITION_FACTOR)) & _MASK


def _mixed_sum(words: torch.Tensor, position_terms: torch.Tensor, start: int) -> torch.Tensor:
    """Sum of the mixed words. Word i has position start + i; position_terms[i] is i * _POSITION_FACTOR."""
    mixed = position_terms + _signed(start * _POSITION_FACTOR & _MASK)
    mixed ^= words
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> 32
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> 29
    return mixed.sum()
