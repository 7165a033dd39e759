"""Hugging Face tensors put together from the chunks of a distributed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model.convert.checkpoint_layout import UNSTACKED_LAYER_KEY, tensor_location
from megatron_webrl.model.convert.dist_checkpoint_files import Box, DistCheckpointReader, StoredChunk, ensure_aligned
from megatron_webrl.model.convert.hf_files import DTYPE_NAMES, LoadError, TensorSpec
from megatron_webrl.model.parameter_map import ParameterMapping, ShardRange, parameter_mappings, shard_ranges


class ScratchBuffers:
    """Memory that tensors are put together in: one while the one before it is being written."""

    def __init__(self) -> None:
        self._memory, self._other = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of arbitrary contents that is all of its storage. It is good until the next call but one."""
        size = torch.Size(shape).numel() * dtype.itemsize
        self._memory, self._other = self._other, self._memory
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go first
            self._memory = torch.empty(size, dtype=torch.uint8)
        return torch.frombuffer(self._memory.numpy(), dtype=dtype, count=torch.Size(shape).numel()).view(*shape)


class HFReader:
    """Reads the tensors of the model that `description` describes; results are converted to `dtype` if one is given."""

    def __init__(self, reader: DistCheckpointReader, hf_config: Any, dtype: torch.dtype | None) -> None:
        self.reader, self.text_config, self.dtype = reader, hf_config.text_config, dtype
        self.layers_stacked = UNSTACKED_LAYER_KEY not in reader.tensors
        self.mappings: dict[str, list[ParameterMapping]] = {}
        for entry in parameter_mappings(hf_config):
            self.mappings.setdefault(entry.hf_param, []).append(entry)
        self.scratch = ScratchBuffers()

    def tensor_specs(self) -> list[TensorSpec]:
        """All tensors, in the order of the map. Raises LoadError for one of a type that weights do not have here."""
        return [
            TensorSpec(name, entries[0].tensor_shape, self._type(entries[0])) for name, entries in self.mappings.items()
        ]

    def read_parts(self, name: str) -> Iterator[Tensor]:
        """A tensor's contents in order, each contiguous: all of it, or each expert's. Good until the next but one."""
        for _, part in groupby(self.mappings[name], key=fused_expert_index):
            yield self.read_part(list(part))

    def read_part(self, mappings: Sequence[ParameterMapping]) -> Tensor:
        """What entries of one `part_number` make of their tensor, whatever its form. Good until the next call but one.

        It may lie at any byte of memory: see `dist_files.aligned`.
        """
        first = mappings[0]
        axes = sum(isinstance(axis, int) for axis in first.part_index)
        shape, dtype = first.tensor_shape[axes:], self._type(first)
        part: Tensor | None = None
        for chunk, wanted in self._wanted(mappings).items():
            data = self.reader.read_chunk(chunk)
            for entry, overlap, target in wanted:
                found = data[overlap.slices_in(chunk.box)].reshape(target.sizes)
                whole = target.sizes == shape and not entry.transposed and found.dtype == dtype
                if whole and found.is_contiguous():
                    return found
                if part is None:
                    part = self.scratch.allocate(shape, dtype)
                inside = part[entry.part_index[axes:]]
                inside = inside.t() if entry.transposed else inside
                inside = inside[target.slices_in(Box((0,) * len(target.sizes), entry.shape))]
                if entry.transposed:
                    copy_transposed(inside.t(), ensure_aligned(found))
                else:
                    inside.copy_(ensure_aligned(found))
        assert part is not None
        return part

    def _wanted(
        self, entries: Sequence[ParameterMapping]
    ) -> dict[StoredChunk, list[tuple[ParameterMapping, Box, Box]]]:
        """Of each chunk that holds some of the entries: the entry, the box in the stored tensor and in its part."""
        wanted: dict[StoredChunk, list[tuple[ParameterMapping, Box, Box]]] = {}
        for entry in entries:
            where = tensor_location(entry, self.text_config, self.layers_stacked)
            axes = len(where.leading_index)
            for piece in shard_ranges(entry, 0, 1):
                box, shift = _box(entry, piece), [0] * len(entry.shape)
                shift[piece.dim] = piece.part_offset - piece.shard_offset
                box = Box((*where.leading_index, *box.offsets), (*[1] * axes, *box.sizes))
                for chunk in self.reader.tensors[where.key].overlapping(box):
                    overlap = chunk.box.intersection(box)
                    assert overlap is not None
                    offsets = tuple(a + b for a, b in zip(overlap.offsets[axes:], shift, strict=True))
                    wanted.setdefault(chunk, []).append((entry, overlap, Box(offsets, overlap.sizes[axes:])))
        return wanted

    def _type(self, entry: ParameterMapping) -> torch.dtype:
        where = tensor_location(entry, self.text_config, self.layers_stacked)
        found = self.reader.tensors[where.key].dtype
        if found not in DTYPE_NAMES:
            raise LoadError(f"tensor {where.key} of {self.reader.folder} has type {found}, which weights do not have")
        return self.dtype or found


def fused_expert_index(mapping: ParameterMapping) -> int | None:
    """Which part of its tensor an entry belongs to: the expert of a tensor that holds all, None for all of it."""
    first = mapping.part_index[0]
    return first if isinstance(first, int) else None


def copy_transposed(target: Tensor, source: Tensor) -> None:
    """Copy rows to columns: in two steps where it takes them, since torch is fast between contiguous memory only."""
    columns = source.contiguous().t()
    if not target.is_contiguous() or target.dtype != source.dtype:
        columns = columns.contiguous()
    target.copy_(columns)


def _box(entry: ParameterMapping, piece: ShardRange) -> Box:
    """A piece's box in the whole parameter."""
    axes = range(len(entry.shape))
    offsets = tuple(piece.shard_offset if axis == piece.dim else 0 for axis in axes)
    return Box(offsets, tuple(piece.length if axis == piece.dim else entry.shape[axis] for axis in axes))
