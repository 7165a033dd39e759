"""Units of a weight transfer: boxes of tensors, copied from one rank's parameter to another's."""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch


class Shard(NamedTuple):
    """A box of a Hugging Face tensor, or of a mapping's part of one, in an engine rank's parameter."""

    engine_param: str
    tensor_offset: tuple[int, ...]  # start of the box in the tensor
    size: tuple[int, ...]
    parameter_offset: tuple[int, ...]  # start in the parameter, with leading indices for stacked dimensions


class Slice(NamedTuple):
    """A box of a tensor that is copied from a trainer rank's parameter to an engine rank's parameter."""

    hf_param: str  # Hugging Face tensor
    size: tuple[int, ...]
    source_param: str  # the trainer's parameter
    source_offset: tuple[int, ...]
    target_param: str  # the engine's parameter
    target_offset: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.size)


class TransferMessage(NamedTuple):
    """Slices sent together, concatenated, from one rank to another."""

    sender: int  # trainer rank
    receiver: int  # rank within the engine
    slices: tuple[Slice, ...]
    elements: int


def box_index(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Index of a box in a parameter. Leading offsets select from stacked dimensions; the others start ranges."""
    stacked = len(offset) - len(size)
    ranges = (slice(start, start + length) for start, length in zip(offset[stacked:], size, strict=True))
    return (*offset[:stacked], *ranges)


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of the tensor's bytes in row-major order, on any device and of any shape."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
