"""Pack sequences into micro-batches and assign these to replicas: balanced by FLOPs, nearly full, deterministic.

The floating-point operations of a sequence are computed from the model's configuration.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_webrl.model.vision_language.packed_input import partition_costs
from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape
from megatron_webrl.trainer.data.prefix_merging import (
    MergedSequence,
    PrefixTree,
    Segment,
    separate_sequences,
    sequence_images,
    unique_images,
)
from megatron_webrl.trainer.multi_node.screenshots import ReplicaNodes, assign_to_nodes

FORWARD_ONLY_SHARE = 1 / 3  # a backward pass costs two forward passes; frozen parameters need none
PackedSequence = list[int]  # indices of the merged sequences that one micro-batch computes
SHARED_PART_WEIGHT = 8.0  # weight of the cost that an item adds, which shared parts lower, against bins' balance
MAX_SEQUENCE_TOKENS_RATIO = 4  # tokens of a bin's sequences with their common prefixes, over the limit of its tokens
SEARCH_STEP_FRACTION = 0.01  # the search for the number of bins advances by this fraction of it, at least by one
MAX_SWAP_CANDIDATES = 16  # bins in which a swap is tried for an item that fits nowhere; more find little and cost much


@dataclass(frozen=True)
class FlopsEstimator:
    """Operations of a forward pass, a multiply-add as two. The backward pass, twice the cost, changes no proportion."""

    per_token: float  # per token: projections, MLPs and linear attention of all layers
    per_token_pair: float  # per token and preceding token of its sequence: attention
    per_scored_token: float  # per scored token: the output layer
    per_patch: float  # per image patch: vision tower
    per_patch_pair: float  # per ordered pair of patches of one frame: the tower's attention

    @classmethod
    def from_hf_config(cls, hf_config: Any, train_vision: bool = True) -> FlopsEstimator:
        """From a transformers configuration of Qwen3-VL or Qwen3.5."""
        model, share = ModelShape.from_description(hf_config.to_dict()), 1.0 if train_vision else FORWARD_ONLY_SHARE
        token, pair, scored, patch, patch_pair = (
            MicrobatchShape(*(float(each == counted) for each in range(5))) for counted in range(5)
        )
        layers = range(model.layers)
        return cls(
            per_token=sum(
                model.projections(layer, token) + model.experts(layer, token) + model.delta_rule(layer, token)
                for layer in layers
            ),
            per_token_pair=sum(model.attention(layer, pair) for layer in layers),
            per_scored_token=model.output(scored),
            per_patch=share * model.vision(patch),
            per_patch_pair=share * model.vision_attention(patch_pair),
        )

    def image_flops(self, grid: Sequence[int]) -> float:
        """Operations of encoding one image of `grid` patches (t, h, w)."""
        frames, patches = grid[0], grid[1] * grid[2]
        return float(frames * (patches * self.per_patch + patches**2 * self.per_patch_pair))

    def segment_flops(self, start: int, stop: int) -> float:
        """Operations of the tokens `start` to `stop` of a sequence, which attend to all before them."""
        pairs = (stop * (stop + 1) - start * (start + 1)) / 2
        return (stop - start) * self.per_token + pairs * self.per_token_pair

    def scoring_flops(self, sequence: MergedSequence) -> float:
        """Operations of the output layer for a sequence's response tokens."""
        return len(sequence.response_positions) * self.per_scored_token

    def packed_flops(self, *sequences: MergedSequence) -> float:
        """Operations of sequences packed together: an image that several of them share is encoded once."""
        return self.tree_flops(sequences, separate_sequences(sequences).segments)

    def tree_flops(self, sequences: Sequence[MergedSequence], segments: Iterable[Segment]) -> float:
        """Operations of packed sequences whose `segments` (`PrefixTree`) are computed, and images encoded, once."""
        text = sum(self.segment_flops(each.start, each.stop) for each in segments)
        images = sum(self.image_flops(grid) for _, grid in unique_images(sequences))
        return text + sum(map(self.scoring_flops, sequences)) + images


@dataclass(frozen=True)
class _Part:
    """An image or a segment, computed once for all items of a bin that have it."""

    tokens: int  # an image's tokens are those of segments
    cost: float


@dataclass(frozen=True)
class _Item:
    index: int
    own: _Part  # what no other item can share
    parts: dict[int, _Part]  # number of each distinct image and of each shared segment -> the part

    @property
    def tokens(self) -> int:
        return self.own.tokens + sum(part.tokens for part in self.parts.values())

    @property
    def cost(self) -> float:
        return self.own.cost + sum(part.cost for part in self.parts.values())


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
    tree: PrefixTree | None = None,
) -> list[list[PackedSequence]]:
    """Packed sequences of each data-parallel replica, of at most `max_tokens` tokens; each sequence is in one of them.

    Sequences with common segments in `tree` (None: there are none) are kept together, as these are computed once. Each
    sequence counts with all of its tokens towards MAX_SEQUENCE_TOKENS_RATIO times the limit, which bounds the scored
    tokens and the copies of a common prefix's keys.
    All replicas get the same number: a multiple of `multiple`, the smallest found; with fewer sequences some are empty.
    Temperatures are packed and assigned separately. A replica's most expensive ones come first, so that replicas that
    synchronise in every micro-batch wait little. Where replicas are on different `nodes`, a sequence goes to the nodes
    that hold its screenshots, as long as loads stay balanced. A pure function: every rank computes the same plan.
    Raises ValueError naming the length of a sequence longer than `max_tokens`.
    """
    items = _items(sequences, flops, separate_sequences(sequences) if tree is None else tree)
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
    shares = list(zip(items_of, replicas_of, strict=True))
    each = max(len(_pack(part, max_tokens, len(on) * multiple)) // len(on) for part, on in shares if part)
    while None in (packed := [_place(part, max_tokens, each * len(on)) for part, on in shares]):
        each += multiple
    result: list[list[PackedSequence]] = [[] for _ in nodes.by_replica]
    for bins, on in zip(packed, replicas_of, strict=True):
        for replica, assigned in zip(on, _assign(bins or (), len(on)), strict=True):
            result[replica] = assigned
    return result


def _items(sequences: Sequence[MergedSequence], flops: FlopsEstimator, tree: PrefixTree) -> list[_Item]:
    paths = [tree.path(index) for index in range(len(sequences))]
    users = Counter(segment for path in paths for segment in path)
    segments = [_Part(each.length, flops.segment_flops(each.start, each.stop)) for each in tree.segments]
    ids: dict[tuple[bytes, tuple[int, int, int]], int] = {}
    items = []
    for index, (sequence, path) in enumerate(zip(sequences, paths, strict=True)):
        parts = {segment: segments[segment] for segment in path if users[segment] > 1}
        for image in sequence_images(sequence):
            number = len(segments) + ids.setdefault(image, len(ids))
            parts[number] = _Part(0, flops.image_flops(image[1]))
        own = [segments[segment] for segment in path if users[segment] == 1]
        cost = sum(part.cost for part in own) + flops.scoring_flops(sequence)
        items.append(_Item(index, _Part(sum(part.tokens for part in own), cost), parts))
    return items


def _pack(items: Sequence[_Item], max_tokens: int, unit: int) -> list[_Bin]:
    """Items in bins whose number is the smallest multiple of `unit` that the search finds."""
    ordered = sorted(items, key=lambda item: (-item.cost, item.index))
    most = math.ceil(len(items) / unit)  # always enough: one bin per item
    parts = {number: part for item in items for number, part in item.parts.items()}
    tokens = sum(item.own.tokens for item in items) + sum(part.tokens for part in parts.values())
    count = math.ceil(tokens / (max_tokens * unit))
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
        self.sequence_room = np.full(count, MAX_SEQUENCE_TOKENS_RATIO * max_tokens)
        self.tokens = np.array([item.tokens for item in items])
        self.bin_of = np.full(len(items), -1)
        self.freed = np.zeros(len(items), np.int64)  # tokens of an item that no other of its bin shares
        # Part -> bin -> places of the items with the part.
        self.users: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))

    def best_bin(self, place: int) -> int | None:
        """The bin with room and the least cost + SHARED_PART_WEIGHT * added cost, which shared parts reduce."""
        item = self.items[place]
        added, needed = np.full(len(self.costs), item.cost), np.full(len(self.costs), item.tokens)
        for number, part in item.parts.items():
            bins = list(self.users[number])
            added[bins] -= part.cost
            needed[bins] -= part.tokens
        empty = self.room == self.max_tokens
        fitting = (self.room >= needed) & (self.sequence_room >= item.tokens)
        # Once only as many items as empty bins are left, each item must fill an empty one.
        allowed = empty if empty.sum() >= len(self.items) - place else fitting
        after = np.where(allowed, self.costs + (1 + SHARED_PART_WEIGHT) * added, math.inf)
        best = int(after.argmin())
        return best if after[best] < math.inf else None

    def make_room(self, place: int) -> int | None:
        """Fit item `place` into one of the roomiest bins by the swap that moves the fewest tokens; returns it.

        Tokens that an item would share in another bin are not considered: a swap frees at least what is computed here.
        """
        room_of = np.where(self.bin_of >= 0, self.room[self.bin_of], -1)
        sequence_room_of = self.sequence_room[self.bin_of]
        for target in np.argsort(-self.room, kind="stable")[:MAX_SWAP_CANDIDATES].tolist():
            lacking = self.tokens[place] - self.room[target]
            sequence_lacking = self.tokens[place] - self.sequence_room[target]
            for longer in sorted(self.contents[target], key=lambda p: (self.tokens[p], p)):
                moved, whole = self.freed[longer] - self.tokens, self.tokens[longer] - self.tokens
                fitting = (moved >= lacking) & (self.tokens[longer] - self.freed <= room_of) & (self.bin_of != target)
                fitting &= (whole >= sequence_lacking) & (whole <= sequence_room_of)
                if fitting.any():
                    shorter = int(np.where(fitting, moved, np.iinfo(np.int64).max).argmin())
                    self._swap(longer, shorter)
                    return int(target)
        return None

    def add(self, place: int, target: int) -> None:
        """Put an item into a bin."""
        item = self.items[place]
        added, needed = item.own.cost, item.own.tokens
        for number, part in item.parts.items():
            users = self.users[number][target]
            if not users:
                added, needed = added + part.cost, needed + part.tokens
            elif len(users) == 1:
                self.freed[next(iter(users))] -= part.tokens
            users.add(place)
        self.freed[place] = needed
        self.costs[target] += added
        self.room[target] -= needed
        self.sequence_room[target] -= item.tokens
        self.bin_of[place] = target
        self.contents[target].append(place)

    def _swap(self, one: int, other: int) -> None:
        targets = int(self.bin_of[other]), int(self.bin_of[one])
        for place in (one, other):
            self._remove(place)
        for place, target in zip((one, other), targets, strict=True):
            self.add(place, target)

    def _remove(self, place: int) -> None:
        item, source = self.items[place], int(self.bin_of[place])
        self.contents[source].remove(place)
        self.room[source] += self.freed[place]
        self.sequence_room[source] += item.tokens
        self.bin_of[place] = -1
        self.costs[source] -= item.own.cost
        for number, part in item.parts.items():
            users = self.users[number][source]
            users.remove(place)
            if not users:
                del self.users[number][source]
                self.costs[source] -= part.cost
            elif len(users) == 1:
                self.freed[next(iter(users))] += part.tokens


def _assign(bins: Sequence[_Bin], replicas: int) -> list[list[PackedSequence]]:
    """Equally many bins for each replica, most expensive first."""
    shares = partition_costs([each.cost for each in bins], replicas, len(bins) // replicas)
    return [[bins[i].indices for i in share] for share in shares]
