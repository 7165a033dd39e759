"""Where a sequence is computed: on the nodes that hold its screenshots, unless others would then have less to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_webrl.trainer.merging import Chain
from megatron_webrl.trainer.outline import size_of

EVEN = 0.02
"""Sites whose loads differ from the mean by no more than this share are not evened out further."""

Site = frozenset[int]
"""Nodes whose ranks make the pixels of a replica."""


@dataclass(frozen=True)
class Sites:
    """Where each data-parallel replica is, and what is there."""

    of_replica: tuple[Site, ...]
    has: Callable[[bytes, Site], bool]  # whether a site has the screenshot of this name

    @property
    def different(self) -> tuple[Site, ...]:
        """Each site once."""
        return tuple(dict.fromkeys(self.of_replica))

    def replicas(self, site: Site) -> list[int]:
        """Those at a site."""
        return [replica for replica, there in enumerate(self.of_replica) if there == site]


def assign(chains: Sequence[Chain], costs: Sequence[float], sites: Sites) -> list[list[int]]:
    """Indices of the chains that each of the different sites computes, rising. A pure function of its arguments.

    Each begins at the site that lacks the least of it. Then the site with the most to do for each of its replicas gives
    chains to the one with the least, as long as that makes the larger load smaller: those first that move the fewest
    bytes for their cost, where a screenshot counts once however many chains need it.
    """
    cost = np.asarray(costs, np.float64)
    share = np.array([len(sites.replicas(site)) for site in sites.different], np.float64)
    lacking = _Lacking(chains, sites)
    loads = np.zeros(len(share))  # for each replica
    place = np.empty(len(chains), np.int64)  # of each chain
    for index in range(len(chains)):
        least = lacking.bytes[:, index]
        place[index] = min(np.flatnonzero(least == least.min()), key=lambda p: loads[p])
        loads[place[index]] += cost[index] / share[place[index]]
    while loads.max() > (1 + EVEN) * cost.sum() / share.sum():
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

    def __init__(self, chains: Sequence[Chain], sites: Sites) -> None:
        places = sites.different
        self._names = [list(dict.fromkeys(map(bytes, chain.images))) for chain in chains]
        self._users: dict[bytes, list[int]] = defaultdict(list)
        for index, names in enumerate(self._names):
            for name in names:
                self._users[name].append(index)
        self._missing = {  # name -> bytes at each place
            name: np.array([0 if sites.has(name, site) else size_of(name) for site in places], np.int64)
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
