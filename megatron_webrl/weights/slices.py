"""What a weight transfer is made of: boxes of tensors, from one rank's parameter into another's."""

from __future__ import annotations

import math
from typing import NamedTuple


class Shard(NamedTuple):
    """A box of a Hugging Face tensor (or of an expert's part of one, see model.parameter_map) in a rank's parameter."""

    engine_param: str
    tensor_offset: tuple[int, ...]  # where the box begins in the tensor
    size: tuple[int, ...]
    parameter_offset: tuple[
        int, ...
    ]  # where it begins in the parameter; one number more for each dimension that stacks tensors


class Slice(NamedTuple):
    """What of a tensor goes from one parameter of a trainer rank to one of an engine rank."""

    hf_param: str  # of the Hugging Face tensor
    size: tuple[int, ...]
    source_param: str  # the trainer's parameter
    source_offset: tuple[int, ...]
    target_param: str  # the engine's parameter
    target_offset: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in the box."""
        return math.prod(self.size)


class TransferMessage(NamedTuple):
    """Slices that travel together, one after the other, from one rank to another."""

    sender: int  # rank of the trainer
    receiver: int  # rank within its engine
    slices: tuple[Slice, ...]
    elements: int


def box_index(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Index of a box in a parameter: leading numbers of `place` pick one of a stack, the others begin a range."""
    stacked = len(offset) - len(size)
    ranges = (slice(start, start + length) for start, length in zip(offset[stacked:], size, strict=True))
    return (*offset[:stacked], *ranges)
