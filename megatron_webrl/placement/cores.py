"""Assign the cores of one node to its processes: every core to one process, near the NUMA node of its GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError

Cores = tuple[int, ...]
RANK_THREADS = 6  # busy threads of a rank on a GPU: main, autograd, three of NCCL's proxies, writer of checkpoints


def assign_cores(config: Config, ranks: int, engines: Sequence[int]) -> tuple[Cores, ...]:
    """Cores of each trainer rank, then of each worker. Raises ConfigError.

    `engines`: processes of each worker's engine. A rank takes the cores that it keeps busy; the workers share the other
    cores equally; each from its own NUMA node first. Without cluster.numa_cores processes are not bound.
    """
    if not config.cluster.numa_cores:
        return ((),) * (ranks + len(engines))
    free = [list(parse_cores(text)) for text in config.cluster.numa_cores]
    _check_disjoint(free)
    total = sum(map(len, free))
    if config.cluster.gpus_per_node:  # all that a rank keeps busy, if ranks then take at most half
        threads = config.trainer.image_workers
        cores = threads + max(1, min(RANK_THREADS, total // (2 * max(ranks, 1)) - threads))
    else:
        cores = max(1, total // (ranks + sum(engines)))
    if ranks * cores + len(engines) > total:
        raise ConfigError(
            f"cluster.numa_cores gives a node {total} cores, but its {ranks} trainer ranks take {cores} each and its "
            f"{len(engines)} workers at least one; name more cores, or leave cluster.numa_cores out"
        )
    homes = _homes(config, len(free), ranks, engines)
    assigned = [_take(free, home, cores) for home in homes[:ranks]] + _share(free, homes[ranks:])
    return tuple(tuple(sorted(each)) for each in assigned)


def parse_cores(text: str) -> Cores:
    """Core numbers of a list such as "0-31,64-95", ascending. Raises ConfigError."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"cluster.numa_cores={text!r} is not a list of cores such as 0-31,64-95")
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(sorted(cores))


def format_cores(cores: Sequence[int]) -> str:
    """The shortest list that `parse_cores` reads back; empty without cores."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][1] + 1 == core:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _check_disjoint(numa: Sequence[Sequence[int]]) -> None:
    seen: set[int] = set()
    for core in (core for cores in numa for core in cores):
        if core in seen:
            raise ConfigError(f"cluster.numa_cores names core {core} twice; each core lies in one NUMA node")
        seen.add(core)


def _homes(config: Config, numa: int, ranks: int, engines: Sequence[int]) -> list[int]:
    """The NUMA node of each process: that of its first GPU; without GPUs the processes are spread evenly."""
    first = [*range(ranks)]
    position = 0 if config.cluster.colocate and not config.evaluation.only else ranks
    for size in engines:
        first.append(position)
        position += size
    return [gpu * numa // (config.cluster.gpus_per_node or position) for gpu in first]


def _take(free: list[list[int]], home: int, count: int) -> list[int]:
    """Remove `count` cores from `free`: from NUMA node `home` first, then from the others by distance."""
    taken: list[int] = []
    for number in sorted(range(len(free)), key=lambda number: (abs(number - home), number)):
        wanted = count - len(taken)
        taken += free[number][:wanted]
        del free[number][:wanted]
    return taken


def _share(free: list[list[int]], homes: Sequence[int]) -> list[list[int]]:
    """Share all free cores equally between processes: first those of their NUMA node, then the rest of the others."""
    each, more = divmod(sum(map(len, free)), len(homes))
    quotas = [each + (index < more) for index in range(len(homes))]
    shares: list[list[int]] = [[] for _ in homes]
    for number, cores in enumerate(free):
        near = [index for index, home in enumerate(homes) if home == number]
        for position, index in enumerate(near):
            fair = -(-len(cores) // (len(near) - position))
            wanted = min(fair, quotas[index])
            shares[index] += cores[:wanted]
            del cores[:wanted]
    for index, home in enumerate(homes):
        shares[index] += _take(free, home, quotas[index] - len(shares[index]))
    return shares
