"""Where a sequence is computed: on the nodes that hold its screenshots, unless others would then have less to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_webrl.trainer.data.merging import MergedSequence
from megatron_webrl.trainer.images.image_keys import image_size

BALANCE_TOLERANCE = 0.02
"""Sites whose loads differ from the mean by no more than this share are not evened out further."""

NodeSet = frozenset[int]
"""Nodes whose ranks make the pixels of a replica."""


@dataclass(frozen=True)
class ReplicaNodes:
    """Where each data-parallel replica is, and what is there."""

    by_replica: tuple[NodeSet, ...]
    has_image: Callable[[bytes, NodeSet], bool]  # whether a site has the screenshot of this name

    @property
    def unique_node_sets(self) -> tuple[NodeSet, ...]:
        """Each site once."""
        return tuple(dict.fromkeys(self.by_replica))

    def replicas_on(self, site: NodeSet) -> list[int]:
        """Those at a site."""
        return [replica for replica, there in enumerate(self.by_replica) if there == site]


def assign_to_nodes(chains: Sequence[MergedSequence], costs: Sequence[float], sites: ReplicaNodes) -> list[list[int]]:
    """Indices of the chains that each of the different sites computes, rising. A pure function of its arguments.

    Each begins at the site that lacks the least of it. Then the site with the most to do for each of its replicas gives
    chains to the one with the least, as long as that makes the larger load smaller: those first that move the fewest
    bytes for their cost, where a screenshot counts once however many chains need it.
    """
    cost = np.asarray(costs, np.float64)
    share = np.array([len(sites.replicas_on(site)) for site in sites.unique_node_sets], np.float64)
    lacking = _Lacking(chains, sites)
    loads = np.zeros(len(share))  # for each replica
    place = np.empty(len(chains), np.int64)  # of each chain
    for index in range(len(chains)):
        least = lacking.bytes[:, index]
        place[index] = min(np.flatnonzero(least == least.min()), key=lambda p: loads[p])
        loads[place[index]] += cost[index] / share[place[index]]
    while loads.max() > (1 + BALANCE_TOLERANCE) * cost.sum() / share.sum():
        high, low = int(loads.argmax()), int(loads.argmin())
        fitting = np.flatnonzero((place == high) & (loads[low] + cost / share[low] < loads[high]))
        if not len(fitting):
            break
        chosen = fitting[np.lexsort((fitting, -cost[fitting], lacking.bytes[low, fitting] / cost[fitting]))[0]]
        place[chosen] = low
        loads[high] -= cost[chosen] / share[high]
        loads[low] += cost[chosen] / share[low]
        lacking.bring(int(chosen), low)
    return [np.flatnonzero(place == each).tolist() for each in range(len(share))]


class _Lacking:
    """Bytes of each chain's screenshots that each site lacks, less what was brought there for another chain."""

    def __init__(self, chains: Sequence[MergedSequence], sites: ReplicaNodes) -> None:
        places = sites.unique_node_sets
        self._names = [list(dict.fromkeys(map(bytes, chain.images))) for chain in chains]
        self._users: dict[bytes, list[int]] = defaultdict(list)
        for index, names in enumerate(self._names):
            for name in names:
                self._users[name].append(index)
        self._missing = {  # name -> bytes at each place
            name: np.array([0 if sites.has_image(name, site) else image_size(name) for site in places], np.int64)
            for name in self._users
        }
        self.bytes = np.zeros((len(places), len(chains)), np.int64)
        for name, users in self._users.items():
            self.bytes[:, users] += self._missing[name][:, None]

    def bring(self, index: int, place: int) -> None:
        """The screenshots of a chain are brought to a place."""
        for name in self._names[index]:
            if missing := self._missing[name][place]:
                self.bytes[place, self._users[name]] -= missing
                self._missing[name][place] = 0
