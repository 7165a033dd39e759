"""Checksums of tensors: the same number for the same bytes in the same order, on every device and in every shape."""

from __future__ import annotations

import torch

_WORD = 8  # bytes
_MASK = 2**64 - 1
_CHUNK_WORDS = {"cpu": 2**15}  # what stays in the cache; other devices want few large steps
_LARGE_CHUNK_WORDS = 2**22


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


# Odd constants with their bits spread evenly (the golden ratio, then the multipliers of splitmix64's finaliser).
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum (0..2**64-1) of the tensor's bytes in row-major order; its shape does not count.

    Every word of eight bytes is mixed with its position, so that two values that change places are noticed.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    size = data.numel()
    words, rest = divmod(size, _WORD)
    if data.storage_offset() % _WORD:
        data = data.clone()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if words:
        whole = data[: words * _WORD].view(torch.int64)
        length = min(words, _CHUNK_WORDS.get(data.device.type, _LARGE_CHUNK_WORDS))
        places = torch.arange(length, dtype=torch.int64, device=data.device).mul_(_STEP)
        for start in range(0, words, length):
            part = whole[start : start + length]
            total += _mixed(part, places[: part.numel()], start)
    if rest:
        last = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
        last[:rest] = data[words * _WORD :]
        total += _mixed(last.view(torch.int64), torch.zeros(1, dtype=torch.int64, device=data.device), words)
    return (int(total) ^ (size * _STEP)) & _MASK


def _mixed(words: torch.Tensor, places: torch.Tensor, start: int) -> torch.Tensor:
    """Sum of the words after mixing; word i is at position start + i, and places[i] is i * _STEP."""
    mixed = places + _signed(start * _STEP & _MASK)
    mixed ^= words
    mixed *= _FIRST
    mixed ^= mixed >> 32
    mixed *= _SECOND
    mixed ^= mixed >> 29
    return mixed.sum()
