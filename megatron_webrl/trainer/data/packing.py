"""Which sequences share a row, and which replica takes it: balanced by cost, filled up, deterministic."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_webrl.trainer.data.flops import FlopsEstimator, sequence_images
from megatron_webrl.trainer.data.merging import MergedSequence
from megatron_webrl.trainer.exchange.node_assignment import ReplicaNodes, assign_to_nodes

PackedSequence = list[int]
"""Indices of the chains of a row."""
SHARED_IMAGE_WEIGHT = 8.0
"""How much a saved encoding of a shared image counts against the balance of rows."""
SEARCH_STEP_FRACTION = 0.01
"""The number of rows is searched for in steps of this share of it, but at least of one."""
MAX_SWAP_CANDIDATES = 16
"""Rows in which room is made for a sequence that fits nowhere; more find little and cost much."""


@dataclass(frozen=True)
class _Item:
    """A chain as the packing sees it."""

    index: int
    tokens: int
    text: float  # cost without its images
    images: dict[int, float]  # number of each distinct image -> cost

    @property
    def cost(self) -> float:
        return self.text + sum(self.images.values())


@dataclass(frozen=True)
class _Filled:
    row: PackedSequence
    cost: float


def pack_sequences(
    chains: Sequence[MergedSequence],
    cost: FlopsEstimator,
    limit: int,
    replicas: int = 1,
    multiple: int = 1,
    sites: ReplicaNodes | None = None,
) -> list[list[PackedSequence]]:
    """The rows of each data-parallel replica, of at most `limit` tokens, each chain in one row.

    All replicas get the same number of rows, a multiple of `multiple`, as few as are found; where there are fewer
    chains than rows, some rows are empty. Chains of different temperatures share no row, and each temperature's rows
    are dealt out by themselves. A replica's rows come dearest first, so that replicas that wait for each other in
    every row wait for equals. With `sites` that differ, a chain goes to where its screenshots are, as far as that
    leaves replicas with equally much to do. A pure function of its arguments: every rank finds the same.
    Raises ValueError naming a chain that is longer than a row.
    """
    items = _items(chains, cost)
    for item in items:
        if item.tokens > limit:
            raise ValueError(
                f"a sample of {item.tokens} tokens exceeds trainer.tokens_per_microbatch={limit}; "
                "set it to at least rollout.max_model_len"
            )
    result: list[list[PackedSequence]] = [[] for _ in range(replicas)]
    for temperature in sorted({chain.temperature for chain in chains}):
        alike = [item for item in items if chains[item.index].temperature == temperature]
        if sites is None or len(sites.unique_node_sets) == 1:
            dealt = _deal(_pack(alike, limit, replicas * multiple), replicas)
        else:
            dealt = _deal_by_site(alike, chains, limit, multiple, sites)
        for rows, more in zip(result, dealt, strict=True):
            rows += more
    return result


def _deal_by_site(
    items: Sequence[_Item], chains: Sequence[MergedSequence], limit: int, multiple: int, sites: ReplicaNodes
) -> list[list[PackedSequence]]:
    """Rows of each replica, made at each site of its own items, equally many everywhere."""
    assigned = assign_to_nodes([chains[item.index] for item in items], [item.cost for item in items], sites)
    held = [sorted((items[i] for i in part), key=lambda item: (-item.cost, item.index)) for part in assigned]
    places = [sites.replicas_on(site) for site in sites.unique_node_sets]
    packed = [
        _pack(part, limit, len(there) * multiple) if part else [] for part, there in zip(held, places, strict=True)
    ]
    each = max(len(rows) // len(there) for rows, there in zip(packed, places, strict=True))
    while (even := _same(packed, held, limit, [each * len(there) for there in places])) is None:
        each += multiple
    dealt: list[list[PackedSequence]] = [[] for _ in sites.by_replica]
    for rows, there in zip(even, places, strict=True):
        for replica, mine in zip(there, _deal(rows, len(there)), strict=True):
            dealt[replica] = mine
    return dealt


def _same(
    packed: Sequence[list[_Filled]], held: Sequence[Sequence[_Item]], limit: int, counts: Sequence[int]
) -> list[list[_Filled]] | None:
    """The items of each site in as many rows as `counts` says; None if they do not fit so somewhere."""
    found = []
    for rows, items, count in zip(packed, held, counts, strict=True):
        fitting = rows if len(rows) == count else _place(items, limit, count)
        if fitting is None:
            return None
        found.append(fitting)
    return found


def _items(chains: Sequence[MergedSequence], cost: FlopsEstimator) -> list[_Item]:
    numbers: dict[tuple[bytes, tuple[int, int, int]], int] = {}
    items = []
    for index, chain in enumerate(chains):
        images = {
            numbers.setdefault(image, len(numbers)): cost.image_flops(image[1]) for image in sequence_images(chain)
        }
        items.append(_Item(index, chain.length, cost.text_flops(chain), images))
    return items


def _pack(items: Sequence[_Item], limit: int, unit: int) -> list[_Filled]:
    """Rows whose number is the smallest multiple of `unit` that is found to do."""
    ordered = sorted(items, key=lambda item: (-item.cost, item.index))
    # As many rows as items always do: each then has one of its own.
    most = math.ceil(len(items) / unit)
    count = math.ceil(sum(item.tokens for item in items) / (limit * unit))
    step = math.ceil(count * SEARCH_STEP_FRACTION)
    failed, stride = count - 1, step
    while (rows := _place(ordered, limit, count * unit)) is None:
        failed, count, stride = count, min(count + stride, most), 2 * stride
    while count - failed > step:
        middle = (failed + count) // 2
        fewer = _place(ordered, limit, middle * unit)
        if fewer is None:
            failed = middle
        else:
            rows, count = fewer, middle
    return rows


def _place(items: Sequence[_Item], limit: int, count: int) -> list[_Filled] | None:
    """The dearest item first, each onto the best row with room for it; None if no room is found for one."""
    rows = _Rows(items, limit, count)
    for place in range(len(items)):
        row = rows.best(place)
        if row is None:
            row = rows.make_room(place)
        if row is None:
            return None
        rows.add(place, row)
    return [
        _Filled([items[place].index for place in inside], float(cost))
        for inside, cost in zip(rows.inside, rows.costs, strict=True)
    ]


class _Rows:
    """Rows being filled with items, which go by their places in `items`."""

    def __init__(self, items: Sequence[_Item], limit: int, count: int) -> None:
        self.items, self.limit = items, limit
        self.inside: list[list[int]] = [[] for _ in range(count)]
        self.costs, self.room = np.zeros(count), np.full(count, limit)
        self.tokens = np.array([item.tokens for item in items])
        self.row_of = np.full(len(items), -1)
        self.holders: dict[int, Counter[int]] = defaultdict(Counter)  # image -> row -> its items with the image

    def best(self, place: int) -> int | None:
        """The row with room that the item leaves cheapest, where what it adds counts SHARING times more.

        What it adds is less in a row that holds some of its images: they are encoded there anyway.
        """
        item = self.items[place]
        added = np.full(len(self.costs), item.cost)
        for image, cost in item.images.items():
            added[list(self.holders[image])] -= cost
        empty = self.room == self.limit
        # Each of the last items has a row of its own to fill, if need be.
        allowed = empty if empty.sum() >= len(self.items) - place else self.room >= item.tokens
        after = np.where(allowed, self.costs + (1 + SHARED_IMAGE_WEIGHT) * added, math.inf)
        row = int(after.argmin())
        return row if after[row] < math.inf else None

    def make_room(self, place: int) -> int | None:
        """A row that has room after one of its items changed places with a shorter one of another row.

        Of the exchanges that do, the one that moves the fewest tokens is made, in one of the rows with the most room.
        """
        room_of = np.where(self.row_of >= 0, self.room[self.row_of], -1)
        for row in np.argsort(-self.room, kind="stable")[:MAX_SWAP_CANDIDATES].tolist():
            lacking = self.tokens[place] - self.room[row]
            for longer in sorted(self.inside[row], key=lambda p: (self.tokens[p], p)):
                moved = self.tokens[longer] - self.tokens
                fitting = (moved >= lacking) & (moved <= room_of) & (self.row_of != row)
                if fitting.any():
                    shorter = int(np.where(fitting, moved, np.iinfo(np.int64).max).argmin())
                    self._exchange(longer, shorter)
                    return int(row)
        return None

    def add(self, place: int, row: int) -> None:
        """Put an item into a row."""
        item = self.items[place]
        self.costs[row] += item.text + sum(c for image, c in item.images.items() if not self.holders[image][row])
        self.room[row] -= item.tokens
        self.row_of[place] = row
        self.inside[row].append(place)
        for image in item.images:
            self.holders[image][row] += 1

    def _exchange(self, one: int, other: int) -> None:
        rows = int(self.row_of[other]), int(self.row_of[one])
        for place in (one, other):
            self._remove(place)
        for place, row in zip((one, other), rows, strict=True):
            self.add(place, row)

    def _remove(self, place: int) -> None:
        item, row = self.items[place], int(self.row_of[place])
        self.inside[row].remove(place)
        self.room[row] += item.tokens
        self.row_of[place] = -1
        self.costs[row] -= item.text
        for image, cost in item.images.items():
            self.holders[image][row] -= 1
            if not self.holders[image][row]:
                del self.holders[image][row]
                self.costs[row] -= cost


def _deal(rows: Sequence[_Filled], replicas: int) -> list[list[PackedSequence]]:
    """As many rows to each replica: the dearest first, to the replica that has the least so far."""
    share = len(rows) // replicas
    result: list[list[PackedSequence]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for place in sorted(range(len(rows)), key=lambda i: (-rows[i].cost, i)):
        replica = min((r for r in range(replicas) if len(result[r]) < share), key=lambda r: (loads[r], r))
        result[replica].append(rows[place].row)
        loads[replica] += rows[place].cost
    return result
