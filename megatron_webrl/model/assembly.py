"""Hugging Face tensors put together from the chunks of a distributed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model.dist_files import Box, Chunk, DistReader, aligned
from megatron_webrl.model.hf_files import NAMES, LoadError, Spec
from megatron_webrl.model.parameter_map import Entry, Piece, model_map, pieces
from megatron_webrl.model.stored import FIRST_LAYER_ALONE, place


class Scratch:
    """Memory that tensors are put together in: one while the one before it is being written."""

    def __init__(self) -> None:
        self._memory, self._other = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of arbitrary contents that is all of its storage. It is good until the next call but one."""
        size = torch.Size(shape).numel() * dtype.itemsize
        self._memory, self._other = self._other, self._memory
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go first
            self._memory = torch.empty(size, dtype=torch.uint8)
        return torch.frombuffer(self._memory.numpy(), dtype=dtype, count=torch.Size(shape).numel()).view(*shape)


class Assembly:
    """Reads the tensors of the model that `description` describes; results are converted to `dtype` if one is given."""

    def __init__(self, reader: DistReader, description: Any, dtype: torch.dtype | None) -> None:
        self.reader, self.text, self.dtype = reader, description.text_config, dtype
        self.stacked = FIRST_LAYER_ALONE not in reader.tensors
        self.entries: dict[str, list[Entry]] = {}
        for entry in model_map(description):
            self.entries.setdefault(entry.name, []).append(entry)
        self.scratch = Scratch()

    def specs(self) -> list[Spec]:
        """All tensors, in the order of the map. Raises LoadError for one of a type that weights do not have here."""
        return [Spec(name, entries[0].tensor_shape, self._type(entries[0])) for name, entries in self.entries.items()]

    def parts(self, name: str) -> Iterator[Tensor]:
        """A tensor's contents in order, each contiguous: all of it, or each expert's. Good until the next but one."""
        for _, part in groupby(self.entries[name], key=part_number):
            yield self.part(list(part))

    def part(self, entries: Sequence[Entry]) -> Tensor:
        """What entries of one `part_number` make of their tensor, whatever its form. Good until the next call but one.

        It may lie at any byte of memory: see `dist_files.aligned`.
        """
        first = entries[0]
        axes = sum(isinstance(axis, int) for axis in first.within)
        shape, dtype = first.tensor_shape[axes:], self._type(first)
        part: Tensor | None = None
        for chunk, wanted in self._wanted(entries).items():
            data = self.reader.read(chunk)
            for entry, overlap, target in wanted:
                found = data[overlap.within(chunk.box)].reshape(target.sizes)
                whole = target.sizes == shape and not entry.transposed and found.dtype == dtype
                if whole and found.is_contiguous():
                    return found
                if part is None:
                    part = self.scratch.take(shape, dtype)
                inside = part[entry.within[axes:]]
                inside = inside.t() if entry.transposed else inside
                inside = inside[target.within(Box((0,) * len(target.sizes), entry.shape))]
                if entry.transposed:
                    copy_transposed(inside.t(), aligned(found))
                else:
                    inside.copy_(aligned(found))
        assert part is not None
        return part

    def _wanted(self, entries: Sequence[Entry]) -> dict[Chunk, list[tuple[Entry, Box, Box]]]:
        """Of each chunk that holds some of the entries: the entry, the box in the stored tensor and in its part."""
        wanted: dict[Chunk, list[tuple[Entry, Box, Box]]] = {}
        for entry in entries:
            where = place(entry, self.text, self.stacked)
            axes = len(where.index)
            for piece in pieces(entry, 0, 1):
                box, shift = _box(entry, piece), [0] * len(entry.shape)
                shift[piece.dim] = piece.tensor - piece.parameter
                box = Box((*where.index, *box.offsets), (*[1] * axes, *box.sizes))
                for chunk in self.reader.tensors[where.key].overlapping(box):
                    overlap = chunk.box.overlap(box)
                    assert overlap is not None
                    offsets = tuple(a + b for a, b in zip(overlap.offsets[axes:], shift, strict=True))
                    wanted.setdefault(chunk, []).append((entry, overlap, Box(offsets, overlap.sizes[axes:])))
        return wanted

    def _type(self, entry: Entry) -> torch.dtype:
        where = place(entry, self.text, self.stacked)
        found = self.reader.tensors[where.key].dtype
        if found not in NAMES:
            raise LoadError(f"tensor {where.key} of {self.reader.folder} has type {found}, which weights do not have")
        return self.dtype or found


def part_number(entry: Entry) -> int | None:
    """Which part of its tensor an entry belongs to: the expert of a tensor that holds all, None for all of it."""
    first = entry.within[0]
    return first if isinstance(first, int) else None


def copy_transposed(target: Tensor, source: Tensor) -> None:
    """Copy rows to columns: in two steps where it takes them, since torch is fast between contiguous memory only."""
    columns = source.contiguous().t()
    if not target.is_contiguous() or target.dtype != source.dtype:
        columns = columns.contiguous()
    target.copy_(columns)


def _box(entry: Entry, piece: Piece) -> Box:
    """A piece's box in the whole parameter."""
    axes = range(len(entry.shape))
    offsets = tuple(piece.parameter if axis == piece.dim else 0 for axis in axes)
    return Box(offsets, tuple(piece.length if axis == piece.dim else entry.shape[axis] for axis in axes))
