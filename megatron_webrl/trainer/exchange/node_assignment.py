"""Assigns sequences to nodes: where their screenshots are, as long as loads stay balanced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_webrl.trainer.data.merging import MergedSequence
from megatron_webrl.trainer.images.image_keys import image_size

BALANCE_TOLERANCE = 0.02  # balancing stops once no load per replica exceeds the mean by more than this fraction
NodeSet = frozenset[int]  # nodes of the ranks that encode a replica's images


@dataclass(frozen=True)
class ReplicaNodes:
    """The nodes of each data-parallel replica, and the images on them."""

    by_replica: tuple[NodeSet, ...]
    has_image: Callable[[bytes, NodeSet], bool]  # image key, nodes -> whether one of the nodes has the image

    @property
    def unique_node_sets(self) -> tuple[NodeSet, ...]:
        """Each node set once."""
        return tuple(dict.fromkeys(self.by_replica))

    def replicas_on(self, node_set: NodeSet) -> list[int]:
        """The replicas on a node set."""
        return [replica for replica, nodes in enumerate(self.by_replica) if nodes == node_set]


def assign_to_nodes(
    sequences: Sequence[MergedSequence], costs: Sequence[float], nodes: ReplicaNodes
) -> list[list[int]]:
    """Ascending indices of the sequences that each unique node set computes. A pure function of its arguments.

    Each sequence starts on the node set that misses the fewest bytes of its images. Then the node set with the highest
    load per replica gives sequences to the one with the lowest, while that reduces the higher load: first the sequence
    that transfers the fewest bytes for its cost, where an image counts once for all sequences that need it.
    """
    cost = np.asarray(costs, np.float64)
    replicas = np.array([len(nodes.replicas_on(node_set)) for node_set in nodes.unique_node_sets], np.float64)
    missing = _MissingBytes(sequences, nodes)
    loads = np.zeros(len(replicas))  # per replica
    target = np.empty(len(sequences), np.int64)  # node set of each sequence
    for index in range(len(sequences)):
        candidates = missing.bytes[:, index]
        target[index] = min(np.flatnonzero(candidates == candidates.min()), key=lambda p: loads[p])
        loads[target[index]] += cost[index] / replicas[target[index]]
    while loads.max() > (1 + BALANCE_TOLERANCE) * cost.sum() / replicas.sum():
        high, low = int(loads.argmax()), int(loads.argmin())
        movable = np.flatnonzero((target == high) & (loads[low] + cost / replicas[low] < loads[high]))
        if not len(movable):
            break
        chosen = movable[np.lexsort((movable, -cost[movable], missing.bytes[low, movable] / cost[movable]))[0]]
        target[chosen] = low
        loads[high] -= cost[chosen] / replicas[high]
        loads[low] += cost[chosen] / replicas[low]
        missing.transfer(int(chosen), low)
    return [np.flatnonzero(target == each).tolist() for each in range(len(replicas))]


class _MissingBytes:
    """Bytes of each sequence's images that each node set lacks, without those transferred for another sequence."""

    def __init__(self, sequences: Sequence[MergedSequence], nodes: ReplicaNodes) -> None:
        node_sets = nodes.unique_node_sets
        self._keys = [list(dict.fromkeys(map(bytes, sequence.images))) for sequence in sequences]
        self._users: dict[bytes, list[int]] = defaultdict(list)
        for index, keys in enumerate(self._keys):
            for key in keys:
                self._users[key].append(index)
        self._missing = {  # image key -> missing bytes on each node set
            key: np.array([0 if nodes.has_image(key, each) else image_size(key) for each in node_sets], np.int64)
            for key in self._users
        }
        self.bytes = np.zeros((len(node_sets), len(sequences)), np.int64)
        for key, users in self._users.items():
            self.bytes[:, users] += self._missing[key][:, None]

    def transfer(self, index: int, target: int) -> None:
        """Count the images of a sequence as present on a node set."""
        for key in self._keys[index]:
            if missing := self._missing[key][target]:
                self.bytes[target, self._users[key]] -= missing
                self._missing[key][target] = 0
