"""Which boxes of the trainer's parameters fill which boxes of an engine's: the same for engines that are split alike.

Pure functions on shapes. Who of several replicas sends a box is no matter of this file (see weights.plan).
"""

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
    """All that one rank of an engine receives of what one set of trainer ranks holds, in the order of the map."""

    replica_ranks: tuple[int, ...]  # trainer ranks, ascending; each holds all of it
    receiver: int  # rank within the engine
    slices: list[Slice] = field(default_factory=list)
    mapping_indices: list[int] = field(default_factory=list)  # of each slice: its entry's number in the map
    element_offsets: list[int] = field(default_factory=list)  # of each slice: elements of the run before it
    num_elements: int = 0

    def add(self, mapping: int, piece: Slice, elements: int) -> None:
        """Append a slice, of so many elements, of the map's entry of that number."""
        self.slices.append(piece)
        self.mapping_indices.append(mapping)
        self.element_offsets.append(self.num_elements)
        self.num_elements += elements

    def floor_to_row(self, element: int) -> int:
        """The last element, at or before this one, at which a slice or a row of a slice begins."""
        if element >= self.num_elements:
            return self.num_elements
        number = bisect_right(self.element_offsets, element) - 1
        start = self.element_offsets[number]
        return start + (element - start) // row_elements(self.slices[number]) * row_elements(self.slices[number])

    def slices_between(self, start: int, stop: int) -> list[tuple[int, Slice]]:
        """The slices, each with its entry's number, of the elements [start, stop); both begin a row."""
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
    """Numbers in one row, an entry of dimension 0, of a slice."""
    return piece.elements // piece.size[0]


def slice_rows(piece: Slice, first: int, last: int) -> Slice:
    """The rows [first, last) of a slice."""
    target, stacked = piece.target_offset, len(piece.target_offset) - len(piece.size)
    return piece._replace(
        size=(last - first, *piece.size[1:]),
        source_offset=(piece.source_offset[0] + first, *piece.source_offset[1:]),
        target_offset=(*target[:stacked], target[stacked] + first, *target[stacked + 1 :]),
    )


def slice_runs(
    mappings: Sequence[ParameterMapping], hf_config: Any, sizes: ParallelSizes, ranks: int, engine: EngineSizes
) -> list[SliceRun]:
    """What goes from trainer ranks to the ranks of one engine; every element of the engine's is in one run, once."""
    found: dict[tuple[tuple[int, ...], int], SliceRun] = {}
    held: dict[object, list[list[SliceRun]]] = {}  # entries alike -> shard -> receiver -> run
    forms: dict[object, int] = {}  # of entries
    common: dict[object, list[_Common]] = {}  # by form and the engine's box
    engine_map, experts = EngineMap(hf_config, engine), getattr(hf_config.text_config, "num_experts", 0)

    def runs_of(mapping: ParameterMapping) -> list[list[SliceRun]]:
        return [
            [found.setdefault((group, receiver), SliceRun(group, receiver)) for receiver in range(engine.ranks)]
            for group in replica_ranks(mapping, hf_config, sizes, ranks)
        ]

    for number, mapping in enumerate(mappings):
        kind = (
            mapping.layout.kind == "replicated"
            if mapping.expert is None
            else expert_rank(mapping.expert, experts, sizes)
        )
        alike = (mapping.layer, mapping.expert is None, kind, mapping.megatron_param if mapping.layer is None else "")
        if alike not in held:
            held[alike] = runs_of(mapping)
        into = held[alike]
        form = forms.setdefault((mapping.layout, mapping.shape, len(into)), len(forms))
        for receiver in range(engine.ranks):
            for shard in engine_map.shards_of(mapping, receiver):
                place = shard.parameter_offset[-len(shard.size) :]
                boxes = (form, shard.tensor_offset, shard.size, place)
                if boxes not in common:
                    common[boxes] = _common(mapping, len(into), shard, place)
                for holding, elements, size, source, target in common[boxes]:
                    full = (*shard.parameter_offset[: -len(size)], *target)
                    piece = Slice(mapping.hf_param, size, mapping.megatron_param, source, shard.engine_param, full)
                    into[holding][receiver].add(number, piece, elements)
    return [run for run in found.values() if run.num_elements]


class _Common(NamedTuple):
    """What one of the trainer's shards and a shard of an engine have in common."""

    holding: int  # number of the trainer's shard
    elements: int
    size: tuple[int, ...]
    source: tuple[int, ...]  # place in the trainer's parameter
    target: tuple[int, ...]  # place in the engine's, without the dimensions that stack tensors


def _common(mapping: ParameterMapping, count: int, shard: Shard, place: tuple[int, ...]) -> list[_Common]:
    """What each of the trainer's `count` shards of an entry has in common with an engine's, which lies at `place`."""
    found = []
    for holding in range(count):
        for piece in shard_ranges(mapping, holding, count):
            dim = piece.dim
            start = max(piece.part_offset, shard.tensor_offset[dim])
            length = min(piece.part_offset + piece.length, shard.tensor_offset[dim] + shard.size[dim]) - start
            if length <= 0:
                continue
            size, source, target = list(shard.size), list(shard.tensor_offset), list(place)
            size[dim] = length
            source[dim] = piece.shard_offset + start - piece.part_offset
            target[dim] += start - shard.tensor_offset[dim]
            found.append(_Common(holding, math.prod(size), tuple(size), tuple(source), tuple(target)))
    return found
