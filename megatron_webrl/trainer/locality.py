"""Where a sequence is computed: on the nodes that hold its screenshots, unless others would then have less to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_webrl.trainer.merging import Chain
from megatron_webrl.trainer.outline import size_of

EVEN = 0.02
"""Sites whose loads differ from the mean by no more than this share are not evened out further."""

Site = frozenset[int]
"""Nodes whose ranks make the pixels of a replica."""


@dataclass(frozen=True)
class Sites:
    """Where each data-parallel replica is, and what it would have to be sent."""

    of_replica: tuple[Site, ...]
    absent: Callable[[Chain, Site], int]  # bytes of a chain's screenshots that a site lacks

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
    places = sites.different
    share = [len(sites.replicas(site)) for site in places]
    held: list[set[int]] = [set() for _ in places]
    loads = [0.0] * len(places)  # for each replica

    def put(index: int, place: int) -> None:
        held[place].add(index)
        loads[place] += costs[index] / share[place]

    for index, chain in enumerate(chains):
        least = min(range(len(places)), key=lambda p: (sites.absent(chain, places[p]), loads[p], p))
        put(index, least)
    mean = sum(costs) / sum(share)
    brought: list[set[bytes]] = [set() for _ in places]
    while max(loads) > (1 + EVEN) * mean:
        high = max(range(len(places)), key=lambda p: (loads[p], -p))
        low = min(range(len(places)), key=lambda p: (loads[p], p))
        fitting = [i for i in held[high] if loads[low] + costs[i] / share[low] < loads[high]]
        if not fitting:
            break

        def price(index: int, low: int = low) -> tuple[float, float, int]:
            known = brought[low]
            lacking = sites.absent(chains[index], places[low])
            if lacking:  # what was brought for another chain is there
                lacking -= sum(size_of(name) for name in set(chains[index].images) & known)
            return max(0, lacking) / costs[index], -costs[index], index

        chosen = min(fitting, key=price)
        held[high].remove(chosen)
        loads[high] -= costs[chosen] / share[high]
        put(chosen, low)
        brought[low].update(chains[chosen].images)
    return [sorted(indices) for indices in held]
