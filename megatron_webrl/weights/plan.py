"""Who sends which slice to whom: from the shapes of the model and the layouts of both sides, without communication.

Every rank makes the same plan from the same description. It holds three decisions:
- Which boxes go where follows from the two maps (weights.geometry); it is worked out once for engines that are alike.
- Who of the ranks that hold a box sends it: those on the receiver's node if there are any, else all. Each set of
  possible senders shares its elements out so that the busiest rank of the trainer has as little as can be, over all
  engines together; a set's senders take consecutive parts, so that each deals with few engines.
- In which order: the k-th message of every pair of ranks before any (k+1)-th, rotated so that the senders work on
  different receivers. Both sides of a link work in this one order, so the first unfinished message can always go on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_webrl.model.layout import ParallelSizes, check_parallel_sizes, check_rank_count
from megatron_webrl.model.parameter_map import ParameterMapping, parameter_mappings
from megatron_webrl.weights.engine_map import MAP_VERSION, EngineSizes, check_engine_sizes
from megatron_webrl.weights.slice_overlaps import SliceRun, row_elements, slice_rows, slice_runs
from megatron_webrl.weights.slices import Slice, TransferMessage

TensorShapes = tuple[tuple[str, tuple[int, ...]], ...]

MAX_MESSAGE_BYTES = 32 * 2**20
"""Bytes. Larger messages are no faster, and packing one overlaps with sending another only if there are several."""
_RULE_VERSION = 1  # of the choice of senders and of the order of messages
_SWEEPS = 100


@dataclass(frozen=True)
class TrainerTopology:
    """The sending side."""

    sizes: ParallelSizes
    ranks: int
    nodes: tuple[str, ...]  # of each rank


@dataclass(frozen=True)
class EngineTopology:
    """The receiving side."""

    sizes: tuple[EngineSizes, ...]  # of each engine
    nodes: tuple[tuple[str, ...], ...]  # of each engine: the node of each of its ranks

    @classmethod
    def uniform(cls, sizes: EngineSizes, nodes: Sequence[tuple[str, ...]]) -> EngineTopology:
        """Engines that are all split alike."""
        return cls((sizes,) * len(nodes), tuple(nodes))


class _Part(NamedTuple):
    """The elements [start, stop) of a run, which one trainer rank sends."""

    sender: int
    run: SliceRun
    start: int
    stop: int


class TransferPlan:
    """The transfer of a model from a trainer to all its engines.

    `description`: transformers' configuration. `item_bytes`: size of a number on the wire. `staging_bytes`: the most
    staging memory of one rank; a sender has two messages under way with each of its engines, a receiver two in all.
    Raises ValueError for layouts that do not fit the model or each other, and for too little staging memory.
    """

    digest: str  # 64 hexadecimal digits; equal on two ranks if and only if their plans are
    max_message_bytes: int  # no message is larger

    def __init__(
        self, hf_config: Any, trainer: TrainerTopology, engines: EngineTopology, item_bytes: int, staging_bytes: int
    ) -> None:
        _check_ranks(hf_config, trainer, engines)
        self.trainer, self.engines, self.item_bytes, self.staging_bytes = trainer, engines, item_bytes, staging_bytes
        mappings = parameter_mappings(hf_config)
        self._tensors: TensorShapes = tuple(
            dict.fromkeys((mapping.hf_param, mapping.tensor_shape) for mapping in mappings)
        )
        alike = {
            sizes: slice_runs(mappings, hf_config, trainer.sizes, trainer.ranks, sizes) for sizes in set(engines.sizes)
        }
        self._runs = [alike[sizes] for sizes in engines.sizes]
        self._parts = _share_out(self._runs, trainer, engines)
        self._senders = [tuple(sorted({part.sender for part in parts})) for parts in self._parts]
        self._messages: dict[tuple[int, int | None, int | None], tuple[TransferMessage, ...]] = {}
        of_size = {piece.size: piece for found in alike.values() for run in found for piece in run.slices}
        self.max_message_bytes = self._message_bytes(max(of_size.values(), key=row_elements), staging_bytes)
        self.digest = _digest(mappings, trainer, engines, item_bytes, self.max_message_bytes)

    def senders(self, engine: int) -> tuple[int, ...]:
        """The trainer ranks that send to an engine, ascending."""
        return self._senders[engine]

    def messages(
        self, engine: int, *, sender: int | None = None, receiver: int | None = None
    ) -> tuple[TransferMessage, ...]:
        """An engine's messages in the total order of its link: all, or those of one sender, one receiver or both."""
        key = (engine, sender, receiver)
        if key not in self._messages:
            self._messages[key] = self._make_messages(*key)
        return self._messages[key]

    def bytes_by_sender(self) -> dict[int, int]:
        """Bytes that each trainer rank sends, over all engines."""
        load = dict.fromkeys(range(self.trainer.ranks), 0)
        for parts in self._parts:
            for part in parts:
                load[part.sender] += (part.stop - part.start) * self.item_bytes
        return load

    def bytes_by_pair(self, engine: int) -> dict[tuple[int, int], int]:
        """Bytes that each pair of a trainer rank and a rank of the engine exchanges."""
        traffic: dict[tuple[int, int], int] = defaultdict(int)
        for part in self._parts[engine]:
            traffic[part.sender, part.run.receiver] += (part.stop - part.start) * self.item_bytes
        return dict(traffic)

    def received_bytes(self, engine: int, receiver: int | None = None) -> int:
        """Bytes that an engine, or one of its ranks, receives: what it holds, padding apart."""
        if not 0 <= engine < len(self._runs):
            raise IndexError(f"engine {engine} is not among the {len(self._runs)} of the plan")
        return sum(run.num_elements for run in self._runs[engine] if receiver in (None, run.receiver)) * self.item_bytes

    def tensor_shapes(self) -> TensorShapes:
        """Names and shapes of the Hugging Face tensors in their order, to name what differs between two plans."""
        return self._tensors

    def to_json(self) -> dict[str, Any]:
        """What the other side needs to make the same plan and to see that it did; plain JSON."""
        tensors = base64.b64encode(zlib.compress(json.dumps(self._tensors).encode())).decode()
        return {
            "trainer": asdict(self.trainer) | {"digest": self.digest, "tensors": tensors},
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
        pairs: dict[tuple[int, int], list[_Part]] = defaultdict(list)
        for part in self._parts[engine]:
            if sender in (None, part.sender) and receiver in (None, part.run.receiver):
                pairs[part.sender, part.run.receiver].append(part)
        limit = self.max_message_bytes // self.item_bytes
        place = {rank: number for number, rank in enumerate(self._senders[engine])}
        ranks = self.engines.sizes[engine].ranks
        placed = []
        for (source, target), parts in pairs.items():
            for k, (slices, elements) in enumerate(_pack(_in_order(parts), limit)):
                order = (k, (target - place[source]) % ranks, place[source])
                placed.append((order, TransferMessage(source, target, slices, elements)))
        placed.sort(key=lambda item: item[0])
        return tuple(message for _, message in placed)


def first_difference(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> str:
    """One line that names the first tensor in which two plans' `tensors()` differ."""
    for (name, shape), (other, other_shape) in zip(mine, theirs, strict=False):
        if name != other:
            return f"tensor {name} here is in the place of {other} there"
        if tuple(shape) != tuple(other_shape):
            return f"tensor {name} has shape {list(shape)} here and {list(other_shape)} there"
    if len(mine) != len(theirs):
        longer, where = (mine, "here") if len(mine) > len(theirs) else (theirs, "there")
        return f"tensor {longer[min(len(mine), len(theirs))][0]} is only {where}"
    return f"no tensor differs, from {mine[0][0]} to {mine[-1][0]}: layouts, nodes, types or versions of the map do"


def _check_ranks(hf_config: Any, trainer: TrainerTopology, engines: EngineTopology) -> None:
    sizes = trainer.sizes
    check_parallel_sizes(hf_config.text_config, sizes)
    for engine_sizes in dict.fromkeys(engines.sizes):
        check_engine_sizes(hf_config, engine_sizes)
    check_rank_count(sizes, trainer.ranks)
    if len(trainer.nodes) != trainer.ranks:
        raise ValueError(f"nodes of {len(trainer.nodes)} trainer ranks are given, but there are {trainer.ranks}")
    if not engines.nodes:
        raise ValueError("a plan needs at least one engine")
    if len(engines.sizes) != len(engines.nodes):
        raise ValueError(f"nodes of {len(engines.nodes)} engines are given, and sizes of {len(engines.sizes)}")
    for number, (nodes, engine_sizes) in enumerate(zip(engines.nodes, engines.sizes, strict=True)):
        if len(nodes) != engine_sizes.ranks:
            raise ValueError(f"nodes of {len(nodes)} ranks are given for engine {number}, of {engine_sizes.ranks}")


def _share_out(
    found: Sequence[Sequence[SliceRun]], trainer: TrainerTopology, engines: EngineTopology
) -> list[list[_Part]]:
    """The parts of each engine's runs: who sends them."""
    chosen: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}

    def senders(run: SliceRun, nodes: Sequence[str]) -> tuple[int, ...]:
        key = (run.replica_ranks, nodes[run.receiver])
        if key not in chosen:
            chosen[key] = tuple(rank for rank in key[0] if trainer.nodes[rank] == key[1]) or key[0]
        return chosen[key]

    demands: dict[tuple[int, ...], int] = defaultdict(int)
    for nodes, wanted in zip(engines.nodes, found, strict=True):
        for run in wanted:
            demands[senders(run, nodes)] += run.num_elements
    left = {ranks: list(zip(ranks, share, strict=True))[::-1] for ranks, share in balance_load(demands).items()}
    return [
        [part for run in wanted for part in _take(run, left[senders(run, nodes)])]
        for nodes, wanted in zip(engines.nodes, found, strict=True)
    ]


def _take(run: SliceRun, left: list[tuple[int, int]]) -> Iterable[_Part]:
    """Cut a run between the senders at the end of `left`, each with the elements left of its share; uses them up."""
    position, start = 0, 0  # cuts move to the beginning of a row; the shares are used up as if they did not
    while position < run.num_elements:
        sender, share = left.pop()
        used = min(share, run.num_elements - position)
        if used < share:
            left.append((sender, share - used))
        position += used
        stop = run.floor_to_row(position)
        if stop > start:
            yield _Part(sender, run, start, stop)
        start = stop


def balance_load(demands: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], list[int]]:
    """How much each rank of a set carries of the set's demand, so that the ranks' sums are as even as can be.

    One set after the other fills up its ranks with the least from elsewhere, again and again until nothing moves:
    each time the sum of squares falls, and where it is least the greatest load is, too. Whole numbers throughout, so
    that every machine finds the same.
    """
    load: dict[int, int] = defaultdict(int)
    shares = {ranks: [0] * len(ranks) for ranks in demands}
    order = sorted(demands, key=lambda ranks: (len(ranks), ranks))
    total = sum(demands.values())
    for _ in range(_SWEEPS):
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
    """Pour an amount onto the lowest of some levels; how much each of them gets."""
    order = sorted(range(len(levels)), key=levels.__getitem__)
    pooled = count = 0
    for number in order:
        if count and levels[number] * count - pooled >= amount:
            break
        pooled += levels[number]
        count += 1
    level, extra = divmod(pooled + amount, count)
    given = [0] * len(levels)
    for place, number in enumerate(order[:count]):
        given[number] = level + (place < extra) - levels[number]
    return given


def _in_order(parts: Sequence[_Part]) -> Iterable[Slice]:
    found = [item for part in parts for item in part.run.slices_between(part.start, part.stop)]
    if len(parts) > 1:
        found.sort(key=lambda item: item[0])
    return (piece for _, piece in found)


def _pack(slices: Iterable[Slice], limit: int) -> Iterable[tuple[tuple[Slice, ...], int]]:
    """Fill messages of at most `limit` elements; only a slice larger than that is cut, at its rows."""
    held: list[Slice] = []
    elements = 0
    for piece in slices:
        step = limit // row_elements(piece)  # rows
        for first in range(0, piece.size[0], step):
            whole = piece.size[0] <= step
            part = piece if whole else slice_rows(piece, first, min(first + step, piece.size[0]))
            if elements + part.elements > limit:
                yield tuple(held), elements
                held, elements = [], 0
            held.append(part)
            elements += part.elements
    if held:
        yield tuple(held), elements


def _digest(
    mappings: Sequence[ParameterMapping],
    trainer: TrainerTopology,
    engines: EngineTopology,
    item_bytes: int,
    message_bytes: int,
) -> str:
    head = {
        "versions": [MAP_VERSION, _RULE_VERSION],
        "trainer": asdict(trainer),
        "engines": asdict(engines),
        "item_bytes": item_bytes,
        "message_bytes": message_bytes,
    }
    state = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for mapping in mappings:
        layout = (
            mapping.layout.kind,
            mapping.layout.gate_up_index,
            mapping.layout.num_query_groups,
            mapping.layout.group_stride,
            mapping.layout.group_offset,
        )
        state.update(
            f"{mapping.hf_param} {mapping.tensor_shape} {mapping.shape} {mapping.megatron_param} {layout}\n".encode()
        )
    return state.hexdigest()
