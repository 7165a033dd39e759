"""Which boxes of the trainer's parameters fill which boxes of an engine's: the same for engines that are split alike.

Pure functions on shapes. Who of several replicas sends a box is no matter of this file (see weights.plan).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_webrl.model.layout import Sizes, expert_rank, holders
from megatron_webrl.model.parameter_map import Entry, pieces
from megatron_webrl.weights.engine_map import EngineMap, EngineSizes
from megatron_webrl.weights.slices import Shard, Slice


@dataclass
class Run:
    """All that one rank of an engine receives of what one set of trainer ranks holds, in the order of the map."""

    holders: tuple[int, ...]  # trainer ranks, ascending; each holds all of it
    receiver: int  # rank within the engine
    slices: list[Slice] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)  # of each slice: its entry's number in the map
    starts: list[int] = field(default_factory=list)  # of each slice: elements of the run before it
    elements: int = 0

    def add(self, entry: int, piece: Slice, elements: int) -> None:
        """Append a slice, of so many elements, of the map's entry of that number."""
        self.slices.append(piece)
        self.entries.append(entry)
        self.starts.append(self.elements)
        self.elements += elements

    def row_start(self, element: int) -> int:
        """The last element, at or before this one, at which a slice or a row of a slice begins."""
        if element >= self.elements:
            return self.elements
        number = bisect_right(self.starts, element) - 1
        start = self.starts[number]
        return start + (element - start) // row_elements(self.slices[number]) * row_elements(self.slices[number])

    def between(self, start: int, stop: int) -> list[tuple[int, Slice]]:
        """The slices, each with its entry's number, of the elements [start, stop); both begin a row."""
        found = []
        for number in range(bisect_right(self.starts, start) - 1, len(self.slices)):
            begin, piece = self.starts[number], self.slices[number]
            if begin >= stop:
                break
            if start <= begin and begin + piece.elements <= stop:
                found.append((self.entries[number], piece))
            else:
                row = row_elements(piece)
                first, last = max(start - begin, 0) // row, min(stop - begin, piece.elements) // row
                found.append((self.entries[number], rows(piece, first, last)))
        return found


def row_elements(piece: Slice) -> int:
    """Numbers in one row, an entry of dimension 0, of a slice."""
    return piece.elements // piece.size[0]


def rows(piece: Slice, first: int, last: int) -> Slice:
    """The rows [first, last) of a slice."""
    target, stacked = piece.target_place, len(piece.target_place) - len(piece.size)
    return piece._replace(
        size=(last - first, *piece.size[1:]),
        source_place=(piece.source_place[0] + first, *piece.source_place[1:]),
        target_place=(*target[:stacked], target[stacked] + first, *target[stacked + 1 :]),
    )


def runs(entries: Sequence[Entry], description: Any, sizes: Sizes, ranks: int, engine: EngineSizes) -> list[Run]:
    """What goes from trainer ranks to the ranks of one engine; every element of the engine's is in one run, once."""
    found: dict[tuple[tuple[int, ...], int], Run] = {}
    held: dict[object, list[list[Run]]] = {}  # entries alike -> shard -> receiver -> run
    forms: dict[object, int] = {}  # of entries
    common: dict[object, list[_Common]] = {}  # by form and the engine's box
    engine_map, experts = EngineMap(description, engine), getattr(description.text_config, "num_experts", 0)

    def runs_of(entry: Entry) -> list[list[Run]]:
        return [
            [found.setdefault((group, receiver), Run(group, receiver)) for receiver in range(engine.ranks)]
            for group in holders(entry, description, sizes, ranks)
        ]

    for number, entry in enumerate(entries):
        kind = entry.layout.kind == "replicated" if entry.expert is None else expert_rank(entry.expert, experts, sizes)
        alike = (entry.layer, entry.expert is None, kind, entry.parameter if entry.layer is None else "")
        if alike not in held:
            held[alike] = runs_of(entry)
        into = held[alike]
        form = forms.setdefault((entry.layout, entry.shape, len(into)), len(forms))
        for receiver in range(engine.ranks):
            for shard in engine_map.shards(entry, receiver):
                place = shard.place[-len(shard.size) :]
                boxes = (form, shard.tensor, shard.size, place)
                if boxes not in common:
                    common[boxes] = _common(entry, len(into), shard, place)
                for holding, elements, size, source, target in common[boxes]:
                    full = (*shard.place[: -len(size)], *target)
                    piece = Slice(entry.name, size, entry.parameter, source, shard.parameter, full)
                    into[holding][receiver].add(number, piece, elements)
    return [run for run in found.values() if run.elements]


class _Common(NamedTuple):
    """What one of the trainer's shards and a shard of an engine have in common."""

    holding: int  # number of the trainer's shard
    elements: int
    size: tuple[int, ...]
    source: tuple[int, ...]  # place in the trainer's parameter
    target: tuple[int, ...]  # place in the engine's, without the dimensions that stack tensors


def _common(entry: Entry, count: int, shard: Shard, place: tuple[int, ...]) -> list[_Common]:
    """What each of the trainer's `count` shards of an entry has in common with an engine's, which lies at `place`."""
    found = []
    for holding in range(count):
        for piece in pieces(entry, holding, count):
            dim = piece.dim
            start = max(piece.tensor, shard.tensor[dim])
            length = min(piece.tensor + piece.length, shard.tensor[dim] + shard.size[dim]) - start
            if length <= 0:
                continue
            size, source, target = list(shard.size), list(shard.tensor), list(place)
            size[dim] = length
            source[dim] = piece.parameter + start - piece.tensor
            target[dim] += start - shard.tensor[dim]
            found.append(_Common(holding, math.prod(size), tuple(size), tuple(source), tuple(target)))
    return found
