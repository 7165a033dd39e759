"""Cores of the processes of one node: disjoint, complete, and near the NUMA node of each process's GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_webrl.config.setting import ConfigError

Cores = tuple[int, ...]


@dataclass(frozen=True)
class CoreRequest:
    """What trainer ranks claim of a node's cores."""

    gpus_per_node: int  # of a node
    cores_per_trainer_rank: int  # of each rank; 0: by default
    image_workers: int  # of each rank


def assign_cores(
    numa: Sequence[str], gpu_numa: Sequence[int], claims: CoreRequest, ranks: int, engines: Sequence[int]
) -> tuple[Cores, ...]:
    """The cores of `ranks` trainer ranks, then of workers whose engines have so many processes.

    `numa`: cores of each NUMA node; empty: nobody is bound. A rank takes what it claims, from its own NUMA node first;
    the workers, whose browsers need most, share all others equally, again their own first. Raises ConfigError.
    """
    if not numa:
        return ((),) * (ranks + len(engines))
    free = [list(parse_cores(text)) for text in numa]
    _check_disjoint(free)
    total = sum(map(len, free))
    claim = claims.cores_per_trainer_rank or _default_claim(claims, total, ranks + sum(engines))
    if ranks * claim + len(engines) > total:
        raise ConfigError(
            f"cluster.numa_cores gives a node {total} cores, but its {ranks} trainer ranks take {claim} each and its "
            f"{len(engines)} workers at least one; set cluster.trainer_cores to at most "
            f"{max((total - len(engines)) // max(ranks, 1), 0)}, or leave cluster.numa_cores out"
        )
    homes = _homes(gpu_numa, claims.gpus_per_node, len(free), ranks, engines)
    held = [_take(free, home, claim) for home in homes[:ranks]]
    return tuple(tuple(sorted(cores)) for cores in held + _share(free, homes[ranks:]))


def parse_cores(text: str) -> Cores:
    """The numbers of a list such as "0-31,64-95", ascending. Raises ConfigError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"cluster.numa_cores={text!r} is not a list of cores such as 0-31,64-95")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(sorted(found))


def format_cores(cores: Sequence[int]) -> str:
    """The shortest list that `parse_cores` reads back; empty for none."""
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


def _default_claim(claims: CoreRequest, total: int, processes: int) -> int:
    if claims.gpus_per_node:
        return 1 + claims.image_workers
    return max(1, total // processes)


def _homes(gpu_numa: Sequence[int], gpus: int, numa: int, ranks: int, engines: Sequence[int]) -> list[int]:
    """The NUMA node of each process, by its first GPU; without GPUs processes are spread in equal runs."""
    first = [*range(ranks)]
    position = ranks
    for size in engines:
        first.append(position)
        position += size
    if gpu_numa:
        return [gpu_numa[gpu] for gpu in first]
    return [gpu * numa // (gpus or position) for gpu in first]


def _take(free: list[list[int]], home: int, count: int) -> list[int]:
    """Take cores away from `free`, at home first, then from the other NUMA nodes by distance."""
    taken: list[int] = []
    for number in sorted(range(len(free)), key=lambda number: (abs(number - home), number)):
        wanted = count - len(taken)
        taken += free[number][:wanted]
        del free[number][:wanted]
    return taken


def _share(free: list[list[int]], homes: Sequence[int]) -> list[list[int]]:
    """All cores left, shared equally by the processes at `homes`: first their own, then what others have left."""
    each, more = divmod(sum(map(len, free)), len(homes))
    quotas = [each + (index < more) for index in range(len(homes))]
    held: list[list[int]] = [[] for _ in homes]
    for number, cores in enumerate(free):
        near = [index for index, home in enumerate(homes) if home == number]
        for place, index in enumerate(near):
            fair = -(-len(cores) // (len(near) - place))
            wanted = min(fair, quotas[index])
            held[index] += cores[:wanted]
            del cores[:wanted]
    for index, home in enumerate(homes):
        held[index] += _take(free, home, quotas[index] - len(held[index]))
    return held
