"""Pack sequences into micro-batches and assign these to replicas: balanced by FLOPs, nearly full, deterministic."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_webrl.model.qwen3_vl.packed_input import partition_costs
from megatron_webrl.trainer.data.flops import FlopsEstimator, sequence_images
from megatron_webrl.trainer.data.merging import MergedSequence
from megatron_webrl.trainer.exchange.node_assignment import ReplicaNodes, assign_to_nodes

PackedSequence = list[int]  # indices of the merged sequences that one micro-batch computes
SHARED_IMAGE_WEIGHT = 8.0  # weight of the cost that an item adds, which shared images lower, against bins' balance
SEARCH_STEP_FRACTION = 0.01  # the search for the number of bins advances by this fraction of it, at least by one
MAX_SWAP_CANDIDATES = 16  # bins in which a swap is tried for an item that fits nowhere; more find little and cost much


@dataclass(frozen=True)
class _Item:
    index: int
    tokens: int
    text_cost: float  # without its images
    image_costs: dict[int, float]  # number of each distinct image -> cost

    @property
    def cost(self) -> float:
        return self.text_cost + sum(self.image_costs.values())


@dataclass(frozen=True)
class _Bin:
    indices: PackedSequence
    cost: float


def pack_sequences(
    sequences: Sequence[MergedSequence],
    flops: FlopsEstimator,
    max_tokens: int,
    replicas: int = 1,
    multiple: int = 1,
    nodes: ReplicaNodes | None = None,
) -> list[list[PackedSequence]]:
    """Packed sequences of each data-parallel replica, of at most `max_tokens` tokens; each sequence is in one of them.

    All replicas get the same number: a multiple of `multiple`, the smallest found; with fewer sequences some are empty.
    Temperatures are packed and assigned separately. A replica's most expensive ones come first, so that replicas that
    synchronise in every micro-batch wait little. Where replicas are on different `nodes`, a sequence goes to the nodes
    that hold its screenshots, as long as loads stay balanced. A pure function: every rank computes the same plan.
    Raises ValueError naming the length of a sequence longer than `max_tokens`.
    """
    items = _items(sequences, flops)
    for item in items:
        if item.tokens > max_tokens:
            raise ValueError(
                f"a sample of {item.tokens} tokens exceeds trainer.tokens_per_microbatch={max_tokens}; "
                "set it to at least rollout.max_model_len"
            )
    result: list[list[PackedSequence]] = [[] for _ in range(replicas)]
    for temperature in sorted({sequence.temperature for sequence in sequences}):
        alike = [item for item in items if sequences[item.index].temperature == temperature]
        if nodes is None or len(nodes.unique_node_sets) == 1:
            assigned = _assign(_pack(alike, max_tokens, replicas * multiple), replicas)
        else:
            assigned = _pack_by_node(alike, sequences, max_tokens, multiple, nodes)
        for packed, more in zip(result, assigned, strict=True):
            packed += more
    return result


def _pack_by_node(
    items: Sequence[_Item], sequences: Sequence[MergedSequence], max_tokens: int, multiple: int, nodes: ReplicaNodes
) -> list[list[PackedSequence]]:
    """Pack the items of each node set separately, into equally many bins for every replica."""
    parts = assign_to_nodes([sequences[item.index] for item in items], [item.cost for item in items], nodes)
    items_of = [sorted((items[i] for i in part), key=lambda item: (-item.cost, item.index)) for part in parts]
    replicas_of = [nodes.replicas_on(node_set) for node_set in nodes.unique_node_sets]
    packed = [
        _pack(part, max_tokens, len(replicas) * multiple) if part else []
        for part, replicas in zip(items_of, replicas_of, strict=True)
    ]
    each = max(len(bins) // len(replicas) for bins, replicas in zip(packed, replicas_of, strict=True))
    while (even := _repack(packed, items_of, max_tokens, [each * len(replicas) for replicas in replicas_of])) is None:
        each += multiple
    result: list[list[PackedSequence]] = [[] for _ in nodes.by_replica]
    for bins, replicas in zip(even, replicas_of, strict=True):
        for replica, assigned in zip(replicas, _assign(bins, len(replicas)), strict=True):
            result[replica] = assigned
    return result


def _repack(
    packed: Sequence[list[_Bin]], items_of: Sequence[Sequence[_Item]], max_tokens: int, counts: Sequence[int]
) -> list[list[_Bin]] | None:
    """The items of each node set in as many bins as `counts` says; None if one of them does not fit."""
    result = []
    for bins, items, count in zip(packed, items_of, counts, strict=True):
        fitting = bins if len(bins) == count else _place(items, max_tokens, count)
        if fitting is None:
            return None
        result.append(fitting)
    return result


def _items(sequences: Sequence[MergedSequence], flops: FlopsEstimator) -> list[_Item]:
    ids: dict[tuple[bytes, tuple[int, int, int]], int] = {}
    items = []
    for index, sequence in enumerate(sequences):
        costs = {ids.setdefault(image, len(ids)): flops.image_flops(image[1]) for image in sequence_images(sequence)}
        items.append(_Item(index, sequence.length, flops.text_flops(sequence), costs))
    return items


def _pack(items: Sequence[_Item], max_tokens: int, unit: int) -> list[_Bin]:
    """Items in bins whose number is the smallest multiple of `unit` that the search finds."""
    ordered = sorted(items, key=lambda item: (-item.cost, item.index))
    most = math.ceil(len(items) / unit)  # always enough: one bin per item
    count = math.ceil(sum(item.tokens for item in items) / (max_tokens * unit))
    step = math.ceil(count * SEARCH_STEP_FRACTION)
    failed, stride = count - 1, step
    while (bins := _place(ordered, max_tokens, count * unit)) is None:
        failed, count, stride = count, min(count + stride, most), 2 * stride
    while count - failed > step:
        middle = (failed + count) // 2
        fewer = _place(ordered, max_tokens, middle * unit)
        if fewer is None:
            failed = middle
        else:
            bins, count = fewer, middle
    return bins


def _place(items: Sequence[_Item], max_tokens: int, count: int) -> list[_Bin] | None:
    """Place the items, most expensive first, each into its best bin; None if an item finds no room."""
    filling = _BinFilling(items, max_tokens, count)
    for place in range(len(items)):
        target = filling.best_bin(place)
        if target is None:
            target = filling.make_room(place)
        if target is None:
            return None
        filling.add(place, target)
    return [
        _Bin([items[place].index for place in content], float(cost))
        for content, cost in zip(filling.contents, filling.costs, strict=True)
    ]


class _BinFilling:
    """Bins being filled with items. An item is identified by its place in `items`."""

    def __init__(self, items: Sequence[_Item], max_tokens: int, count: int) -> None:
        self.items, self.max_tokens = items, max_tokens
        self.contents: list[list[int]] = [[] for _ in range(count)]
        self.costs, self.room = np.zeros(count), np.full(count, max_tokens)
        self.tokens = np.array([item.tokens for item in items])
        self.bin_of = np.full(len(items), -1)
        self.image_users: dict[int, Counter[int]] = defaultdict(Counter)  # image -> bin -> items with the image

    def best_bin(self, place: int) -> int | None:
        """The bin with room and the least cost + SHARED_IMAGE_WEIGHT * added cost, which shared images reduce."""
        item = self.items[place]
        added = np.full(len(self.costs), item.cost)
        for image, cost in item.image_costs.items():
            added[list(self.image_users[image])] -= cost
        empty = self.room == self.max_tokens
        # Once only as many items as empty bins are left, each item must fill an empty one.
        allowed = empty if empty.sum() >= len(self.items) - place else self.room >= item.tokens
        after = np.where(allowed, self.costs + (1 + SHARED_IMAGE_WEIGHT) * added, math.inf)
        best = int(after.argmin())
        return best if after[best] < math.inf else None

    def make_room(self, place: int) -> int | None:
        """Fit item `place` into one of the roomiest bins by the swap that moves the fewest tokens; returns it."""
        room_of = np.where(self.bin_of >= 0, self.room[self.bin_of], -1)
        for target in np.argsort(-self.room, kind="stable")[:MAX_SWAP_CANDIDATES].tolist():
            lacking = self.tokens[place] - self.room[target]
            for longer in sorted(self.contents[target], key=lambda p: (self.tokens[p], p)):
                moved = self.tokens[longer] - self.tokens
                fitting = (moved >= lacking) & (moved <= room_of) & (self.bin_of != target)
                if fitting.any():
                    shorter = int(np.where(fitting, moved, np.iinfo(np.int64).max).argmin())
                    self._swap(longer, shorter)
                    return int(target)
        return None

    def add(self, place: int, target: int) -> None:
        """Put an item into a bin."""
        item = self.items[place]
        self.costs[target] += item.text_cost + sum(
            cost for image, cost in item.image_costs.items() if not self.image_users[image][target]
        )
        self.room[target] -= item.tokens
        self.bin_of[place] = target
        self.contents[target].append(place)
        for image in item.image_costs:
            self.image_users[image][target] += 1

    def _swap(self, one: int, other: int) -> None:
        targets = int(self.bin_of[other]), int(self.bin_of[one])
        for place in (one, other):
            self._remove(place)
        for place, target in zip((one, other), targets, strict=True):
            self.add(place, target)

    def _remove(self, place: int) -> None:
        item, source = self.items[place], int(self.bin_of[place])
        self.contents[source].remove(place)
        self.room[source] += item.tokens
        self.bin_of[place] = -1
        self.costs[source] -= item.text_cost
        for image, cost in item.image_costs.items():
            self.image_users[image][source] -= 1
            if not self.image_users[image][source]:
                del self.image_users[image][source]
                self.costs[source] -= cost


def _assign(bins: Sequence[_Bin], replicas: int) -> list[list[PackedSequence]]:
    """Equally many bins for each replica, most expensive first."""
    shares = partition_costs([each.cost for each in bins], replicas, len(bins) // replicas)
    return [[bins[i].indices for i in share] for share in shares]
