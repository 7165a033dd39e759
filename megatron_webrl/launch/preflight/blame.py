"""Which nodes and GPUs are at fault, from the results of all ranks of an exchange. Pure functions.

Every node computes the same answer from the same results, so no message about it is needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from megatron_webrl.launch.preflight.exchange import ExchangeResult, ExchangeStatus

SOCKET_GIB_PER_SECOND = 3.0  # TCP with a connection for each GPU; a card of 100 Gbit/s reaches more than 10
SLOW_FRACTION = 0.5  # a GPU below this share of the median of its node is named
LinkResults = Mapping[int, Mapping[int, Sequence[ExchangeResult]]]
"""By node, by neighbour, by GPU."""

_AT_FAULT = (ExchangeStatus.LOCAL, ExchangeStatus.DIED)  # whatever the others report


def blame_links(results: LinkResults) -> dict[int, list[int]]:
    """GPUs at fault by node, from all-reduces of each node with its neighbours, GPU by GPU.

    A child that died, or hung while the other one did not, is at fault. Otherwise a GPU with one good link is not, so
    that the other end of its bad link is; if neither end has a good link, the later node is.
    """
    found: dict[int, list[int]] = {}
    gpus = max((len(row) for rows in results.values() for row in rows.values()), default=0)
    for gpu in range(gpus):
        for node in sorted(_blame_ends(dict(_edges(results, gpu)))):
            found.setdefault(node, []).append(gpu)
    return found


def blame_group(results: Mapping[int, Sequence[ExchangeResult]], *, complete: bool = True) -> list[int]:
    """The members at fault, from the results of one all-reduce among all of them.

    If none stands out all that failed; none of them if the results are not complete, as silent members are at fault.
    """
    everyone = [result.status for row in results.values() for result in row]
    culprits = _AT_FAULT if set(everyone) == {ExchangeStatus.HUNG} else (*_AT_FAULT, ExchangeStatus.HUNG)
    found = [member for member, row in results.items() if any(result.status in culprits for result in row)]
    if found or not complete:
        return found
    return [member for member, row in results.items() if any(result.status is not ExchangeStatus.OK for result in row)]


def slow_gpus(results: Mapping[int, Sequence[ExchangeResult]]) -> dict[int, tuple[float, float]]:
    """GPUs of a node far below the median of its GPUs: best GiB/s with any neighbour, and the median."""
    rows = [[result.gib_per_second for result in row] for row in results.values()]
    best = [max(speeds) for speeds in zip(*rows, strict=True)]
    if not best:
        return {}
    median = statistics.median(best)
    return {gpu: (speed, median) for gpu, speed in enumerate(best) if speed < SLOW_FRACTION * median}


def socket_warning(results: Mapping[int, Sequence[ExchangeResult]], cards: Sequence[str]) -> str:
    """A warning if no link of a node is faster than sockets, although it has InfiniBand `cards`; empty otherwise."""
    best = max((result.gib_per_second for row in results.values() for result in row), default=0.0)
    if not cards or not 0 < best < SOCKET_GIB_PER_SECOND:
        return ""
    return (
        f"no link is faster than {best:.2f} GiB/s, although the node has {', '.join(cards)}: NCCL may use sockets "
        "(NCCL_DEBUG=INFO shows NET/Socket); look at NCCL_IB_DISABLE, NCCL_IB_HCA (cluster.nics) and the container"
    )


def _edges(results: LinkResults, gpu: int) -> Iterator[tuple[tuple[int, int], tuple[ExchangeStatus, ExchangeStatus]]]:
    """Links between two nodes that both report, with the status at each end."""
    for first, rows in sorted(results.items()):
        for second in sorted(rows):
            if first < second and first in results.get(second, {}):
                yield (first, second), (rows[second][gpu].status, results[second][first][gpu].status)


def _blame_ends(links: Mapping[tuple[int, int], tuple[ExchangeStatus, ExchangeStatus]]) -> set[int]:
    """The ends at fault of these links of one GPU of each node."""
    faulty: set[int] = set()
    for pair, statuses in links.items():
        for node, own, other in zip(pair, statuses, reversed(statuses), strict=True):
            if own in _AT_FAULT or (own is ExchangeStatus.HUNG and other is not ExchangeStatus.HUNG):
                faulty.add(node)
    good = {node for pair, statuses in links.items() if set(statuses) == {ExchangeStatus.OK} for node in pair}
    bad = [pair for pair, statuses in links.items() if set(statuses) != {ExchangeStatus.OK}]
    for pair in bad:
        suspects = [node for node in pair if node not in good]
        if not faulty.intersection(pair) and len(suspects) == 1:
            faulty.add(suspects[0])
    for pair in bad:
        if not faulty.intersection(pair) and not good.intersection(pair):
            faulty.add(max(pair))
    return faulty
