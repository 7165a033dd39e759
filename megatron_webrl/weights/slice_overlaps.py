"""Overlaps of the trainer's shards with an engine's, equal for engines of equal sizes. Pure functions on shapes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_webrl.model.layout import ParallelSizes, expert_rank, replica_ranks
from megatron_webrl.model.parameter_map import ParameterMapping, shard_ranges
from megatron_webrl.weights.engine_map import EngineMap, EngineSizes
from megatron_webrl.weights.slices import Shard, Slice


@dataclass
class SliceRun:
    """Slices that an engine rank receives from one set of trainer replicas, in the order of the parameter map."""

    replica_ranks: tuple[int, ...]  # trainer ranks, ascending; each holds all slices
    receiver: int  # rank within the engine
    slices: list[Slice] = field(default_factory=list)
    mapping_indices: list[int] = field(default_factory=list)  # of each slice: index of its mapping
    element_offsets: list[int] = field(default_factory=list)  # of each slice: elements of the preceding slices
    num_elements: int = 0

    def add(self, mapping_index: int, piece: Slice, elements: int) -> None:
        self.slices.append(piece)
        self.mapping_indices.append(mapping_index)
        self.element_offsets.append(self.num_elements)
        self.num_elements += elements

    def floor_to_row(self, element: int) -> int:
        """Start of the slice row that contains an element."""
        if element >= self.num_elements:
            return self.num_elements
        number = bisect_right(self.element_offsets, element) - 1
        start = self.element_offsets[number]
        return start + (element - start) // row_elements(self.slices[number]) * row_elements(self.slices[number])

    def slices_between(self, start: int, stop: int) -> list[tuple[int, Slice]]:
        """Slices of the elements [start, stop), each with its mapping index. Both ends are row starts."""
        found = []
        for number in range(bisect_right(self.element_offsets, start) - 1, len(self.slices)):
            begin, piece = self.element_offsets[number], self.slices[number]
            if begin >= stop:
                break
            if start <= begin and begin + piece.elements <= stop:
                found.append((self.mapping_indices[number], piece))
            else:
                row = row_elements(piece)
                first, last = max(start - begin, 0) // row, min(stop - begin, piece.elements) // row
                found.append((self.mapping_indices[number], slice_rows(piece, first, last)))
        return found


def row_elements(piece: Slice) -> int:
    """Elements per row (index of dimension 0) of a slice."""
    return piece.elements // piece.size[0]


def slice_rows(piece: Slice, first: int, last: int) -> Slice:
    """Rows [first, last) of a slice."""
    target, stacked = piece.target_offset, len(piece.target_offset) - len(piece.size)
    return piece._replace(
        size=(last - first, *piece.size[1:]),
        source_offset=(piece.source_offset[0] + first, *piece.source_offset[1:]),
        target_offset=(*target[:stacked], target[stacked] + first, *target[stacked + 1 :]),
    )


def slice_runs(
    mappings: Sequence[ParameterMapping], hf_config: Any, sizes: ParallelSizes, ranks: int, engine: EngineSizes
) -> list[SliceRun]:
    """Slices from trainer ranks to the ranks of one engine. Every element of the engine is in exactly one run."""
    runs: dict[tuple[tuple[int, ...], int], SliceRun] = {}
    runs_by_group: dict[object, list[list[SliceRun]]] = {}  # mapping group -> shard -> receiver -> run
    forms: dict[object, int] = {}  # layout form -> number
    overlaps: dict[object, list[_Overlap]] = {}  # by form and engine box
    engine_map, experts = EngineMap(hf_config, engine), getattr(hf_config.text_config, "num_experts", 0)

    def runs_of(mapping: ParameterMapping) -> list[list[SliceRun]]:
        return [
            [
                runs.setdefault((ranks_of_shard, receiver), SliceRun(ranks_of_shard, receiver))
                for receiver in range(engine.ranks)
            ]
            for ranks_of_shard in replica_ranks(mapping, hf_config, sizes, ranks)
        ]

    for number, mapping in enumerate(mappings):
        kind = (
            mapping.layout.kind == "replicated"
            if mapping.expert is None
            else expert_rank(mapping.expert, experts, sizes)
        )
        group = (mapping.layer, mapping.expert is None, kind, mapping.megatron_param if mapping.layer is None else "")
        if group not in runs_by_group:
            runs_by_group[group] = runs_of(mapping)
        into = runs_by_group[group]
        form = forms.setdefault((mapping.layout, mapping.shape, len(into)), len(forms))
        for receiver in range(engine.ranks):
            for shard in engine_map.shards_of(mapping, receiver):
                offset = shard.parameter_offset[-len(shard.size) :]
                boxes = (form, shard.tensor_offset, shard.size, offset)
                if boxes not in overlaps:
                    overlaps[boxes] = _overlaps(mapping, len(into), shard, offset)
                for trainer_shard, elements, size, source, target in overlaps[boxes]:
                    full = (*shard.parameter_offset[: -len(size)], *target)
                    piece = Slice(mapping.hf_param, size, mapping.megatron_param, source, shard.engine_param, full)
                    into[trainer_shard][receiver].add(number, piece, elements)
    return [run for run in runs.values() if run.num_elements]


class _Overlap(NamedTuple):
    """Overlap of a trainer shard and an engine shard."""

    trainer_shard: int
    elements: int
    size: tuple[int, ...]
    source: tuple[int, ...]  # offset in the trainer's parameter
    target: tuple[int, ...]  # offset in the engine's parameter, without stacked dimensions


def _overlaps(mapping: ParameterMapping, count: int, shard: Shard, offset: tuple[int, ...]) -> list[_Overlap]:
    """Overlaps of each of the trainer's `count` shards of a mapping with an engine shard at `offset`."""
    found = []
    for trainer_shard in range(count):
        for piece in shard_ranges(mapping, trainer_shard, count):
            dim = piece.dim
            start = max(piece.part_offset, shard.tensor_offset[dim])
            length = min(piece.part_offset + piece.length, shard.tensor_offset[dim] + shard.size[dim]) - start
            if length <= 0:
                continue
            size, source, target = list(shard.size), list(shard.tensor_offset), list(offset)
            size[dim] = length
            source[dim] = piece.shard_offset + start - piece.part_offset
            target[dim] += start - shard.tensor_offset[dim]
            found.append(_Overlap(trainer_shard, math.prod(size), tuple(size), tuple(source), tuple(target)))
    return found
