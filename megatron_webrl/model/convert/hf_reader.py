"""Assemble Hugging Face tensors from the chunks of a distributed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert.dist_checkpoint_files import (
    UNSTACKED_LAYER_KEY,
    Box,
    DistCheckpointReader,
    StoredChunk,
    ensure_aligned,
    tensor_location,
)
from megatron_webrl.model.convert.hf_files import DTYPE_NAMES, LoadError, TensorSpec
from megatron_webrl.model.parameter_map import ParameterMapping, ShardRange, shard_ranges


class ScratchBuffers:
    """Two alternating buffers: one tensor is assembled while the previous one is written."""

    def __init__(self) -> None:
        self._memory, self._other = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor with its own storage, valid until the next call but one."""
        size = torch.Size(shape).numel() * dtype.itemsize
        self._memory, self._other = self._other, self._memory
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it first
            self._memory = torch.empty(size, dtype=torch.uint8)
        return torch.frombuffer(self._memory.numpy(), dtype=dtype, count=torch.Size(shape).numel()).view(*shape)


class HFReader:
    """Read the model's Hugging Face tensors from a checkpoint, converted to `dtype` if it is given."""

    def __init__(self, reader: DistCheckpointReader, hf_config: Any, dtype: torch.dtype | None) -> None:
        self.reader, self.text_config, self.dtype = reader, hf_config.text_config, dtype
        self.layers_stacked = UNSTACKED_LAYER_KEY not in reader.tensors
        self.mappings: dict[str, list[ParameterMapping]] = {}
        for mapping in parameter_mappings(hf_config):
            self.mappings.setdefault(mapping.hf_param, []).append(mapping)
        self.scratch = ScratchBuffers()

    def tensor_specs(self) -> list[TensorSpec]:
        """Specs of all tensors, in the order of the parameter map. Raises LoadError for an unsupported dtype."""
        return [TensorSpec(name, parts[0].tensor_shape, self._dtype(parts[0])) for name, parts in self.mappings.items()]

    def read_parts(self, name: str) -> Iterator[Tensor]:
        """Contiguous parts of a tensor in order: all of it, or one per expert. Each is valid until the next but one."""
        for _, part in groupby(self.mappings[name], key=fused_expert_index):
            yield self.read_part(list(part))

    def read_part(self, mappings: Sequence[ParameterMapping]) -> Tensor:
        """Assemble the part of a tensor that mappings of one `fused_expert_index` cover.

        It is valid until the next call but one and may be unaligned (see `dist_checkpoint_files.ensure_aligned`).
        """
        first = mappings[0]
        axes = sum(isinstance(axis, int) for axis in first.part_index)
        shape, dtype = first.tensor_shape[axes:], self._dtype(first)
        part: Tensor | None = None
        for chunk, sources in self._sources(mappings).items():
            data = self.reader.read_chunk(chunk)
            for mapping, overlap, target in sources:
                values = data[overlap.slices_in(chunk.box)].reshape(target.sizes)
                whole = target.sizes == shape and not mapping.transposed and values.dtype == dtype
                if whole and values.is_contiguous():
                    return values
                if part is None:
                    part = self.scratch.allocate(shape, dtype)
                inside = part[mapping.part_index[axes:]]
                inside = inside.t() if mapping.transposed else inside
                inside = inside[target.slices_in(Box((0,) * len(target.sizes), mapping.shape))]
                if mapping.transposed:
                    copy_transposed(inside.t(), ensure_aligned(values))
                else:
                    inside.copy_(ensure_aligned(values))
        assert part is not None
        return part

    def _sources(
        self, mappings: Sequence[ParameterMapping]
    ) -> dict[StoredChunk, list[tuple[ParameterMapping, Box, Box]]]:
        """For each chunk: the mappings it overlaps, the box in the stored tensor and the box in the mapping's part."""
        sources: dict[StoredChunk, list[tuple[ParameterMapping, Box, Box]]] = {}
        for mapping in mappings:
            where = tensor_location(mapping, self.text_config, self.layers_stacked)
            axes = len(where.leading_index)
            for piece in shard_ranges(mapping, 0, 1):
                box, shift = _box(mapping, piece), [0] * len(mapping.shape)
                shift[piece.dim] = piece.part_offset - piece.shard_offset
                box = Box((*where.leading_index, *box.offsets), (*[1] * axes, *box.sizes))
                for chunk in self.reader.tensors[where.key].overlapping(box):
                    overlap = chunk.box.intersection(box)
                    assert overlap is not None
                    offsets = tuple(a + b for a, b in zip(overlap.offsets[axes:], shift, strict=True))
                    sources.setdefault(chunk, []).append((mapping, overlap, Box(offsets, overlap.sizes[axes:])))
        return sources

    def _dtype(self, mapping: ParameterMapping) -> torch.dtype:
        where = tensor_location(mapping, self.text_config, self.layers_stacked)
        found = self.reader.tensors[where.key].dtype
        if found not in DTYPE_NAMES:
            raise LoadError(f"tensor {where.key} of {self.reader.folder} has unsupported type {found}")
        return self.dtype or found


def fused_expert_index(mapping: ParameterMapping) -> int | None:
    """Expert index of a mapping in a fused tensor of all experts; None if it maps the whole tensor."""
    first = mapping.part_index[0]
    return first if isinstance(first, int) else None


def copy_transposed(target: Tensor, source: Tensor) -> None:
    """Copy the transpose of `source`, in two steps if needed: torch copies fast only between contiguous tensors."""
    columns = source.contiguous().t()
    if not target.is_contiguous() or target.dtype != source.dtype:
        columns = columns.contiguous()
    target.copy_(columns)


def _box(mapping: ParameterMapping, piece: ShardRange) -> Box:
    """Box of a shard range in the whole parameter."""
    axes = range(len(mapping.shape))
    offsets = tuple(piece.shard_offset if axis == piece.dim else 0 for axis in axes)
    return Box(offsets, tuple(piece.length if axis == piece.dim else mapping.shape[axis] for axis in axes))
