"""Who sends which slice to whom: overlaps of the trainer's and the engines' slices, balanced over senders.

Transfer plan: which rank sends which slice to which rank, computed without communication.

Every rank computes the same plan from the model's shapes and the layouts of both sides:
- Slices are the overlaps of the parameter map and the engine map (weights.slice_overlaps), once per engine size.
- Senders of a slice are its replicas on the receiver's node, or all replicas if there are none there. Each set of
  possible senders divides its elements so that the largest load of a trainer rank over all engines is minimal; its
  senders take consecutive parts, so that each of them sends to few engines.
- Order: the k-th message of every pair of ranks precedes any (k+1)-th, rotated so that senders start with different
  receivers. Both sides of a link follow this order, so the first incomplete message can always proceed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import (
    ParallelSizes,
    check_parallel_sizes,
    check_rank_count,
    expert_rank,
    replica_ranks,
)
from megatron_webrl.model.parameter_map import ParameterMapping, shard_ranges
from megatron_webrl.weights.engine_map import MAP_VERSION, EngineMap, EngineSizes, check_engine_sizes
from megatron_webrl.weights.slices import Shard, Slice, TransferMessage


@dataclass
class SliceRun:
    """Slices that an engine rank receives from one set of trainer replicas, in the order of the parameter map."""

    replica_ranks: tuple[int, ...]  # trainer ranks, ascending; each holds all slices
    receiver: int  # rank within the engine
    slices: list[Slice] = field(default_factory=list)
    mapping_indices: list[int] = field(default_factory=list)  # of each slice: index of its mapping
    element_offsets: list[int] = field(default_factory=list)  # of each slice: elements of the preceding slices
    num_elements: int = 0

    def add(self, mapping_index: int, piece: Slice) -> None:
        self.slices.append(piece)
        self.mapping_indices.append(mapping_index)
        self.element_offsets.append(self.num_elements)
        self.num_elements += piece.elements

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
        for receiver in range(engine.ranks):
            for shard in engine_map.shards_of(mapping, receiver):
                for trainer_shard, runs_of_shard in enumerate(into):
                    for piece in _overlaps(mapping, trainer_shard, len(into), shard):
                        runs_of_shard[receiver].add(number, piece)
    return [run for run in runs.values() if run.num_elements]


def _overlaps(mapping: ParameterMapping, trainer_shard: int, count: int, shard: Shard) -> Iterable[Slice]:
    """Overlaps of one of the trainer's `count` shards of a mapping with an engine shard."""
    for piece in shard_ranges(mapping, trainer_shard, count):
        dim, stacked = piece.dim, len(shard.parameter_offset) - len(shard.size)
        start = max(piece.part_offset, shard.tensor_offset[dim])
        length = min(piece.part_offset + piece.length, shard.tensor_offset[dim] + shard.size[dim]) - start
        if length > 0:
            size, source, target = list(shard.size), list(shard.tensor_offset), list(shard.parameter_offset)
            size[dim] = length
            source[dim] = piece.shard_offset + start - piece.part_offset
            target[stacked + dim] += start - shard.tensor_offset[dim]
            boxes = tuple(size), mapping.megatron_param, tuple(source), shard.engine_param, tuple(target)
            yield Slice(mapping.hf_param, *boxes)


SEPARATE_BYTES = 2 * 2**20  # slices from this size are sent alone, so that they need no copy
MAX_MESSAGE_BYTES = 32 * 2**20  # larger ones are not faster, and packing overlaps with sending only among several
_RULE_VERSION = 3  # of the choice of senders and the message order
_MAX_SWEEPS = 100


@dataclass(frozen=True)
class TrainerTopology:
    """Layout of the sending side."""

    sizes: ParallelSizes
    ranks: int
    nodes: tuple[str, ...]  # node of each rank


@dataclass(frozen=True)
class EngineTopology:
    """Layout of the receiving side."""

    sizes: tuple[EngineSizes, ...]  # of each engine
    nodes: tuple[tuple[str, ...], ...]  # of each engine: node of each rank

    @classmethod
    def uniform(cls, sizes: EngineSizes, nodes: Sequence[tuple[str, ...]]) -> EngineTopology:
        return cls((sizes,) * len(nodes), tuple(nodes))


class _RunPart(NamedTuple):
    """Elements [start, stop) of a run, sent by one trainer rank."""

    sender: int
    run: SliceRun
    start: int
    stop: int


class TransferPlan:
    """Plan of a model's transfer from a trainer to all its engines.

    `item_bytes`: size of an element in transfer. `staging_bytes`: limit of a rank's staging memory; a sender stages two
    messages per engine, a receiver two in total. Raises ValueError for mismatched layouts or too little staging memory.
    """

    digest: str  # 64 hexadecimal digits; equal if and only if the plans are
    max_message_bytes: int  # of the largest message

    def __init__(
        self, hf_config: Any, trainer: TrainerTopology, engines: EngineTopology, item_bytes: int, staging_bytes: int
    ) -> None:
        check_parallel_sizes(hf_config.text_config, trainer.sizes)
        for sizes in dict.fromkeys(engines.sizes):
            check_engine_sizes(hf_config, sizes)
        check_rank_count(trainer.sizes, trainer.ranks)
        self.trainer, self.engines, self.item_bytes, self.staging_bytes = trainer, engines, item_bytes, staging_bytes
        mappings = parameter_mappings(hf_config)
        # Names and shapes of the Hugging Face tensors, in order.
        self.tensors = tuple(dict.fromkeys((entry.hf_param, entry.tensor_shape) for entry in mappings))
        runs_by_sizes = {
            sizes: slice_runs(mappings, hf_config, trainer.sizes, trainer.ranks, sizes) for sizes in set(engines.sizes)
        }
        self._runs = [runs_by_sizes[sizes] for sizes in engines.sizes]
        self._parts = _assign_senders(self._runs, trainer, engines)
        self._senders = [tuple(sorted({part.sender for part in parts})) for parts in self._parts]
        self._messages: dict[tuple[int, int | None, int | None], tuple[TransferMessage, ...]] = {}
        by_shape = {piece.size: piece for runs in runs_by_sizes.values() for run in runs for piece in run.slices}
        self.max_message_bytes = self._message_bytes(max(by_shape.values(), key=row_elements), staging_bytes)
        terms = (MAP_VERSION, _RULE_VERSION, trainer, engines, item_bytes, self.max_message_bytes)
        self.digest = hashlib.sha256(repr((terms, mappings)).encode()).hexdigest()

    def senders(self, engine: int) -> tuple[int, ...]:
        """Trainer ranks that send to an engine, ascending."""
        return self._senders[engine]

    def messages(
        self, engine: int, *, sender: int | None = None, receiver: int | None = None
    ) -> tuple[TransferMessage, ...]:
        """Messages of an engine in link order, optionally filtered by sender and receiver."""
        key = (engine, sender, receiver)
        if key not in self._messages:
            self._messages[key] = self._make_messages(*key)
        return self._messages[key]

    def bytes_by_sender(self) -> dict[int, int]:
        """Bytes that each trainer rank sends to all engines."""
        load = dict.fromkeys(range(self.trainer.ranks), 0)
        for parts in self._parts:
            for part in parts:
                load[part.sender] += (part.stop - part.start) * self.item_bytes
        return load

    def bytes_by_pair(self, engine: int) -> dict[tuple[int, int], int]:
        """Bytes per pair of trainer rank and engine rank."""
        traffic: dict[tuple[int, int], int] = defaultdict(int)
        for part in self._parts[engine]:
            traffic[part.sender, part.run.receiver] += (part.stop - part.start) * self.item_bytes
        return dict(traffic)

    def received_bytes(self, engine: int, receiver: int | None = None) -> int:
        """Bytes that an engine, or one of its ranks, receives. Padding is not transferred."""
        return sum(run.num_elements for run in self._runs[engine] if receiver in (None, run.receiver)) * self.item_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON from which the other side computes the same plan and verifies it."""
        return {
            "trainer": asdict(self.trainer) | {"digest": self.digest},
            "engines": asdict(self.engines),
            "staging_bytes": self.staging_bytes,
        }

    def _message_bytes(self, widest: Slice, staging_bytes: int) -> int:
        engines_of: dict[int, int] = defaultdict(int)
        for senders in self._senders:
            for sender in senders:
                engines_of[sender] += 1
        most = max(engines_of.values())
        size = min(staging_bytes // (2 * most), MAX_MESSAGE_BYTES) // self.item_bytes * self.item_bytes
        row = row_elements(widest) * self.item_bytes
        if size < row:
            raise ValueError(
                f"staging memory of {staging_bytes} bytes allows messages of {size} bytes, as a rank sends to {most} "
                f"engines, but a row of {widest.hf_param} has {row}: give at least {2 * most * row} bytes "
                "(weights.bucket_mib)"
            )
        return size

    def _make_messages(self, engine: int, sender: int | None, receiver: int | None) -> tuple[TransferMessage, ...]:
        pairs: dict[tuple[int, int], list[_RunPart]] = defaultdict(list)
        for part in self._parts[engine]:
            if sender in (None, part.sender) and receiver in (None, part.run.receiver):
                pairs[part.sender, part.run.receiver].append(part)
        limit = self.max_message_bytes // self.item_bytes
        sender_index = {rank: number for number, rank in enumerate(self._senders[engine])}
        ranks = self.engines.sizes[engine].ranks
        ordered = []
        for (source, target), parts in pairs.items():
            for k, (slices, elements) in enumerate(_pack(_in_order(parts), limit, SEPARATE_BYTES // self.item_bytes)):
                order = (k, (target - sender_index[source]) % ranks, sender_index[source])
                ordered.append((order, TransferMessage(source, target, slices, elements)))
        ordered.sort(key=lambda item: item[0])
        return tuple(message for _, message in ordered)


def _assign_senders(
    runs: Sequence[Sequence[SliceRun]], trainer: TrainerTopology, engines: EngineTopology
) -> list[list[_RunPart]]:
    """Parts of each engine's runs with their senders."""
    candidates: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}

    def senders(run: SliceRun, nodes: Sequence[str]) -> tuple[int, ...]:
        key = (run.replica_ranks, nodes[run.receiver])
        if key not in candidates:
            candidates[key] = tuple(rank for rank in key[0] if trainer.nodes[rank] == key[1]) or key[0]
        return candidates[key]

    demands: dict[tuple[int, ...], int] = defaultdict(int)
    for nodes, engine_runs in zip(engines.nodes, runs, strict=True):
        for run in engine_runs:
            demands[senders(run, nodes)] += run.num_elements
    left = {ranks: list(zip(ranks, share, strict=True))[::-1] for ranks, share in balance_load(demands).items()}
    return [
        [part for run in engine_runs for part in _take(run, left[senders(run, nodes)])]
        for nodes, engine_runs in zip(engines.nodes, runs, strict=True)
    ]


def _take(run: SliceRun, left: list[tuple[int, int]]) -> Iterable[_RunPart]:
    """Divide a run among the senders at the end of `left`, (rank, remaining elements) each; consumes `left`."""
    position, start = 0, 0  # cuts are rounded down to rows; shares are consumed unrounded
    while position < run.num_elements:
        sender, share = left.pop()
        used = min(share, run.num_elements - position)
        if used < share:
            left.append((sender, share - used))
        position += used
        stop = run.floor_to_row(position)
        if stop > start:
            yield _RunPart(sender, run, start, stop)
        start = stop


def balance_load(demands: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], list[int]]:
    """Divide each set's demand over the ranks of the set so that the total loads are as even as possible.

    Each sweep fills the least loaded ranks of one set after the other, until almost nothing moves. A step reduces the
    sum of squares, whose minimum also has the smallest maximum. Integer arithmetic gives every machine the same result.
    """
    load: dict[int, int] = defaultdict(int)
    shares = {ranks: [0] * len(ranks) for ranks in demands}
    order = sorted(demands, key=lambda ranks: (len(ranks), ranks))
    total = sum(demands.values())
    for _ in range(_MAX_SWEEPS):
        moved = 0
        for ranks in order:
            before = shares[ranks]
            elsewhere = [load[rank] - share for rank, share in zip(ranks, before, strict=True)]
            shares[ranks] = _fill(elsewhere, demands[ranks])
            for rank, old, new in zip(ranks, before, shares[ranks], strict=True):
                load[rank] += new - old
                moved += abs(new - old)
        if moved * 10000 <= total:
            break
    return shares


def _fill(levels: Sequence[int], amount: int) -> list[int]:
    """Water-filling: distribute an amount over the lowest levels. Returns the increase of each level."""
    order = sorted(range(len(levels)), key=levels.__getitem__)
    pooled = count = 0
    for number in order:
        if count and levels[number] * count - pooled >= amount:
            break
        pooled += levels[number]
        count += 1
    level, extra = divmod(pooled + amount, count)
    increase = [0] * len(levels)
    for index, number in enumerate(order[:count]):
        increase[number] = level + (index < extra) - levels[number]
    return increase


def _in_order(parts: Sequence[_RunPart]) -> Iterable[Slice]:
    slices = [item for part in parts for item in part.run.slices_between(part.start, part.stop)]
    if len(parts) > 1:
        slices.sort(key=lambda item: item[0])
    return (piece for _, piece in slices)


def _pack(slices: Iterable[Slice], limit: int, separate: int) -> Iterable[tuple[tuple[Slice, ...], int]]:
    """Pack slices into messages of at most `limit` elements; only larger slices are cut, at rows.

    Slices of at least `separate` elements are messages of their own.
    """
    packed: list[Slice] = []
    elements = 0
    for piece in _cut(slices, limit):
        if piece.elements >= separate:
            yield (piece,), piece.elements
            continue
        if elements + piece.elements > limit:
            yield tuple(packed), elements
            packed, elements = [], 0
        packed.append(piece)
        elements += piece.elements
    if packed:
        yield tuple(packed), elements


def _cut(slices: Iterable[Slice], limit: int) -> Iterable[Slice]:
    """The slices, those of more than `limit` elements in several."""
    for piece in slices:
        step = limit // row_elements(piece)  # rows
        for first in range(0, piece.size[0], step):
            yield piece if piece.size[0] <= step else slice_rows(piece, first, min(first + step, piece.size[0]))
