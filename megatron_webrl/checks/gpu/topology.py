"""The machine's NUMA nodes, GPUs and network cards, and how they differ from cluster.*."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.placement.cores import format_cores, parse_cores
from megatron_webrl.util import cuda_driver


@dataclass(frozen=True)
class Topology:
    """What the kernel and the driver say."""

    numa_cores: tuple[frozenset[int], ...]  # of each NUMA node
    gpu_numa: tuple[int | None, ...]  # of each visible GPU; None: the kernel does not say
    nics: frozenset[str]  # InfiniBand devices


def read_topology(root: Path = Path("/sys")) -> Topology:
    """Read sysfs at `root`, and the GPUs' addresses from nvidia-smi if it is there."""
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    cores = tuple(frozenset(parse_cores(text)) for path in nodes if (text := (path / "cpulist").read_text().strip()))
    try:
        addresses = [row[0] for row in cuda_driver.query_visible_gpus("pci.bus_id")]
    except cuda_driver.NvidiaSmiError:
        addresses = []
    infiniband = root / "class/infiniband"
    nics = frozenset(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else frozenset()
    return Topology(cores, tuple(_numa_of(root, address) for address in addresses), nics)


def _numa_of(root: Path, address: str) -> int | None:
    domain, _, rest = address.lower().partition(":")
    file = root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    number = int(file.read_text()) if file.is_file() else -1
    return number if number >= 0 else None


def topology_problems(cluster: ClusterConfig, machine: Topology) -> list[str]:
    """What cluster.* says and the machine has not, in one line each."""
    return [*_core_problems(cluster, machine), *_gpu_problems(cluster, machine), *_nic_problems(cluster, machine)]


def _core_problems(cluster: ClusterConfig, machine: Topology) -> Iterator[str]:
    everything = frozenset().union(*machine.numa_cores)
    for index, text in enumerate(cluster.numa_cores):
        cores = frozenset(parse_cores(text))
        if missing := cores - everything:
            yield f"cluster.numa_cores[{index}]={text}: the machine has no core {min(missing)} (`lscpu`)"
        elif not any(cores <= node for node in machine.numa_cores):
            nodes = "; ".join(format_cores(sorted(node)) for node in machine.numa_cores)
            yield f"cluster.numa_cores[{index}]={text} spans NUMA nodes, which are {nodes} (`lscpu`)"


def _gpu_problems(cluster: ClusterConfig, machine: Topology) -> Iterator[str]:
    found = len(machine.gpu_numa)
    if found < cluster.gpus_per_node:
        yield f"cluster.gpus_per_node={cluster.gpus_per_node}, but {found} GPUs are visible (CUDA_VISIBLE_DEVICES)"
        return
    if not cluster.numa_cores:
        return
    for gpu, node in enumerate(machine.gpu_numa[: cluster.gpus_per_node]):
        index = cluster.gpu_numa[gpu] if cluster.gpu_numa else gpu * len(cluster.numa_cores) // cluster.gpus_per_node
        cores = frozenset(parse_cores(cluster.numa_cores[index]))
        if node is not None and node < len(machine.numa_cores) and not cores & machine.numa_cores[node]:
            yield (
                f"GPU {gpu} is at NUMA node {node}, but cluster.gpu_numa puts it at the cores "
                f"{cluster.numa_cores[index]} (`nvidia-smi topo -m`)"
            )


def _nic_problems(cluster: ClusterConfig, machine: Topology) -> Iterator[str]:
    for name in dict.fromkeys(cluster.nics):
        if name not in machine.nics:
            has = ", ".join(sorted(machine.nics)) or "none"
            yield f"cluster.nics names {name}, but the machine has {has} (/sys/class/infiniband)"
