"""Which process runs where: from a configuration to nodes, ranks, devices, cores, ports and rings.

Pure functions of the configuration: nothing is looked up on a machine, so that every node and every script finds the
same. docs/slurm.md says how to describe the machines (cluster.*).

Trainer ranks count as Megatron does, "tp-cp-ep-dp-pp", the first fastest. Which node a rank is on is another order:
a copy of the model, then a stage of it, then a context-parallel and then a tensor-parallel group lies inside a node
wherever it fits. With a mixture of experts a stage's copy is as many ranks as hold all of its experts. Engines are
dealt out likewise: whole where they fit, else by pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from megatron_webrl.cluster.cores import CoreRequest, Cores, assign_cores
from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.ring.segment import segment_name

RoleName = Literal["trainer", "rollout"]


@dataclass(frozen=True)
class ProcessPlacement:
    """One process of the train step (a rank) or of the rollout step (a worker with its engine and browsers)."""

    role: RoleName
    index: int  # rank, or worker
    node: int
    local_rank: int  # number among the processes of its role on the node
    devices: tuple[int, ...]  # GPUs of the node
    cores: tuple[int, ...]  # of the node; empty: any
    nics: tuple[str, ...]  # of its devices; empty: any
    port: int  # of its own on the node
    follower: int = 0  # of an engine that spans nodes: which of its nodes this is; the worker is on the first

    @property
    def name(self) -> str:
        """What logs and the control plane call it."""
        return (
            rollout_process_name(self.index, self.follower) if self.role == "rollout" else f"{self.role}-{self.index}"
        )


@dataclass(frozen=True)
class RingPlacement:
    """The ring of one node."""

    node: int
    name: str
    workers: tuple[int, ...]  # that write to it
    ranks: tuple[int, ...]  # that read it


@dataclass(frozen=True)
class RankBlocks:
    """Sizes, in ranks, of what should lie inside a node, from large to small."""

    model_copy: int  # the whole model, all experts included
    stage: int  # one pipeline stage of a copy
    context: int  # tensor- times context-parallel
    tensor: int

    @classmethod
    def from_config(cls, config: Config) -> RankBlocks:
        """Those of the trainer."""
        trainer = config.trainer
        context = trainer.tensor_parallel * trainer.context_parallel
        stage = math.lcm(context, trainer.expert_parallel * trainer.expert_tensor_parallel)
        return cls(stage * trainer.pipeline_parallel, stage, context, trainer.tensor_parallel)


@dataclass(frozen=True)
class Placement:
    """All processes of a job, by node; on a node the trainer's come first."""

    nodes: int
    control_port: int  # of the control plane, on the first node
    processes: tuple[ProcessPlacement, ...]
    rings: tuple[RingPlacement, ...]  # of each node
    blocks: RankBlocks

    def on_node(self, node: int) -> tuple[ProcessPlacement, ...]:
        """The processes of a node."""
        return self._by_node[node]

    def of_role(self, role: RoleName) -> tuple[ProcessPlacement, ...]:
        """The processes of a role in the order of their numbers."""
        found = [process for process in self.processes if process.role == role]
        return tuple(sorted(found, key=lambda process: (process.index, process.follower)))

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return asdict(self) | {"processes": [asdict(each) | {"name": each.name} for each in self.processes]}

    @cached_property
    def _by_node(self) -> tuple[tuple[ProcessPlacement, ...], ...]:
        found: list[list[ProcessPlacement]] = [[] for _ in range(self.nodes)]
        for process in self.processes:
            found[process.node].append(process)
        return tuple(map(tuple, found))


def place_processes(config: Config) -> Placement:
    """Place all processes of a configuration. Raises ConfigError, in one line, for what cannot be placed."""
    cluster = config.cluster
    _check_machines(config)
    training, serving = _shares(config)
    blocks = RankBlocks.from_config(config)
    ranks = _deal(_by_copy(config, blocks), (blocks.model_copy, blocks.stage, blocks.context), blocks.tensor, training)
    sizes = (config.ranks_per_engine,)
    engines = _deal(
        range(config.rollout.engines * config.ranks_per_engine), sizes, config.rollout.tensor_parallel, serving
    )
    parts = [_parts(slots, config.ranks_per_engine) for slots in engines]
    numbers: dict[int, int] = {}  # of the next part of each engine
    processes: list[ProcessPlacement] = []
    for node in range(cluster.nodes):
        processes += _processes(config, node, ranks[node], parts[node], numbers)
    control = config.control.port or cluster.base_port
    last = max(process.port for process in processes)
    if last > 65535:
        raise ConfigError(
            f"cluster.base_port={cluster.base_port} and the processes of a node need ports up to {last}; lower it"
        )
    if cluster.base_port < control <= last:
        raise ConfigError(
            f"control.port={control} is among the ports {cluster.base_port + 1} to {last} of the processes "
            "(cluster.base_port); set control.port=0"
        )
    return Placement(cluster.nodes, control, tuple(processes), tuple(_rings(config, processes)), blocks)


def check_cluster(config: Config) -> None:
    """Refuse described machines on which the configuration cannot be placed. Raises ConfigError."""
    if config.cluster.is_configured:
        place_processes(config)


def visible_devices_by_process(config: Config) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each process by name, where cluster.gpus_per_node says that there are GPUs."""
    if not config.cluster.gpus_per_node:
        return {}
    return {process.name: ",".join(map(str, process.devices)) for process in place_processes(config).processes}


def ring_name(config: Config, node: int) -> str:
    """The name of a node's ring, on several nodes. Raises ConfigError for a node that there is not."""
    check_node_number(config, node)
    return segment_name(config.run.name, f"node {node}")


def rollout_process_name(worker: int, part: int) -> str:
    """What logs and the control plane call a part of an engine; part 0 is its worker."""
    return f"rollout-{worker}" + (f".follower-{part}" if part else "")


def worker_name_of(name: str) -> str:
    """The name of the worker to whose engine a rollout process belongs; of other processes their own."""
    return name.partition(".follower-")[0]


def rollout_process_names(config: Config) -> tuple[str, ...]:
    """The workers, and the parts of engines that lie over several nodes."""
    if config.cluster.nodes == 1:
        return config.worker_names
    return tuple(process.name for process in place_processes(config).of_role("rollout"))


def engine_nodes(config: Config, worker: int) -> tuple[int, ...]:
    """The nodes over which the engine of a worker lies; the worker is on the first. Raises ConfigError."""
    if config.cluster.nodes == 1:
        return (0,)
    found = tuple(process.node for process in place_processes(config).of_role("rollout") if process.index == worker)
    if not found:
        raise ConfigError(f"--worker={worker} is not one of the {config.rollout.engines} engines, from 0")
    return found


def check_node_number(config: Config, node: int) -> None:
    """Refuse the number of a node that there is not. Raises ConfigError."""
    if not 0 <= node < config.cluster.nodes:
        raise ConfigError(f"--node={node} is not one of the {config.cluster.nodes} nodes (cluster.nodes), from 0")


def _check_machines(config: Config) -> None:
    cluster = config.cluster
    if cluster.trainer_cores and not cluster.numa_cores:
        raise ConfigError(
            f"cluster.trainer_cores={cluster.trainer_cores} has no effect without cluster.numa_cores; "
            "set both or neither"
        )
    if not cluster.gpus_per_node:
        for name in ("engine_gpus_per_node", "gpu_numa", "nics", "gpu_gib"):
            if (value := getattr(cluster, name)) != getattr(ClusterConfig(), name):
                raise ConfigError(
                    f"cluster.{name}={value} has no effect with cluster.gpus_per_node=0; set cluster.gpus_per_node too"
                )
        return
    if config.model.platform == "cpu":
        raise ConfigError(
            f"cluster.gpus_per_node={cluster.gpus_per_node} with model.platform=cpu: set cluster.gpus_per_node=0, "
            "or platform to auto"
        )
    if not 1 <= cluster.engine_gpus_per_node < cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.engine_gpus_per_node={cluster.engine_gpus_per_node} of "
            f"cluster.gpus_per_node={cluster.gpus_per_node} must leave each role at least one GPU of a node; "
            f"choose 1 to {cluster.gpus_per_node - 1}"
        )
    for name, value in (("gpu_numa", cluster.gpu_numa), ("nics", cluster.nics)):
        if value and len(value) != cluster.gpus_per_node:
            raise ConfigError(
                f"cluster.{name} has {len(value)} entries for cluster.gpus_per_node={cluster.gpus_per_node}; "
                "give one for each GPU"
            )
    if cluster.gpu_numa and not cluster.numa_cores:
        raise ConfigError(
            "cluster.gpu_numa has no effect without cluster.numa_cores; give the cores of each NUMA node, too"
        )
    for number in cluster.gpu_numa:
        if not 0 <= number < len(cluster.numa_cores):
            raise ConfigError(
                f"cluster.gpu_numa={number} is not one of the {len(cluster.numa_cores)} NUMA nodes "
                "of cluster.numa_cores"
            )


def _shares(config: Config) -> tuple[int, int]:
    """Ranks of the trainer and of engines on each node. Raises ConfigError if a role does not fill its share."""
    cluster, trainer, rollout = config.cluster, config.trainer, config.rollout
    serving = rollout.engines * config.ranks_per_engine
    dp, replica = trainer.data_parallel, config.trainer_world_size // trainer.data_parallel
    for name, ranks, size, share, value in (
        (
            "trainer.data_parallel",
            config.trainer_world_size,
            replica,
            cluster.gpus_per_node - cluster.engine_gpus_per_node,
            dp,
        ),
        ("rollout.engines", serving, config.ranks_per_engine, cluster.engine_gpus_per_node, rollout.engines),
    ):
        if cluster.gpus_per_node and ranks != cluster.nodes * share:
            whole, left = divmod(cluster.nodes * share, size)
            way = (
                f"set it to {whole}"
                if whole and not left
                else "change cluster.engine_gpus_per_node or the parallel sizes"
            )
            raise ConfigError(
                f"{name}={value} makes {ranks} ranks, but {cluster.nodes} nodes have {share} GPUs each for them, "
                f"{cluster.nodes * share} in all (cluster.*); {way}"
            )
        if ranks % cluster.nodes:
            raise ConfigError(
                f"{name}={value} makes {ranks} ranks, which cluster.nodes={cluster.nodes} do not divide; every node "
                f"must have equally many: choose a multiple of {cluster.nodes // math.gcd(size, cluster.nodes)}"
            )
    training, serving = config.trainer_world_size // cluster.nodes, serving // cluster.nodes
    for name, size, share in (
        ("trainer.tensor_parallel", trainer.tensor_parallel, training),
        ("rollout.tensor_parallel", rollout.tensor_parallel, serving),
    ):
        if share % size:
            raise ConfigError(
                f"{name}={size} does not divide the {share} ranks of its role on a node, so that a tensor-parallel "
                f"group would span nodes; choose a divisor of {share}"
            )
    return training, serving


def _by_copy(config: Config, blocks: RankBlocks) -> list[int]:
    """All trainer ranks, the ranks of a model copy next to each other, and within it those of a stage."""
    stages = config.trainer.pipeline_parallel
    share = config.trainer_world_size // stages  # ranks of a stage, over all copies
    if share % blocks.stage:
        raise ConfigError(
            f"trainer.expert_parallel x expert_tensor_parallel needs {blocks.stage} ranks for each copy of the "
            f"experts, which do not divide the {share} ranks of a pipeline stage; lower expert_parallel or raise "
            "data_parallel"
        )
    copies = range(0, share, blocks.stage)
    return [
        stage * share + first + i for first in copies for stage in range(stages) for i in range(blocks.stage)
    ]  # fmt: skip


def _deal(order: Sequence[int], blocks: Sequence[int], smallest: int, room: int) -> list[list[int]]:
    """What each node gets of `order`, `room` each: the largest blocks that fit a node whole, the others in parts.

    Each block is a multiple of the next, and `smallest` divides `room`.
    """
    held: list[list[int]] = [[] for _ in range(len(order) // room)]
    left = list(order)
    for block in (*blocks, smallest):
        node, rest = 0, []
        for start in range(0, len(left), block):
            while node < len(held) and room - len(held[node]) < block:
                node += 1
            if node < len(held):
                held[node] += left[start : start + block]
            else:
                rest += left[start : start + block]
        left = rest
    return held


def _parts(slots: Sequence[int], size: int) -> list[tuple[int, int]]:
    """(engine, number of its ranks) in the order in which a node holds them."""
    found: dict[int, int] = {}
    for slot in slots:
        found[slot // size] = found.get(slot // size, 0) + 1
    return list(found.items())


def _processes(
    config: Config, node: int, ranks: Sequence[int], engines: Sequence[tuple[int, int]], parts: dict[int, int]
) -> Iterator[ProcessPlacement]:
    """The processes of one node. `parts` counts the nodes that each engine has already."""
    cluster = config.cluster
    sizes = tuple(size for _, size in engines)
    cores = _node_cores(_Shape(tuple(cluster.numa_cores), tuple(cluster.gpu_numa), _claims(config)), len(ranks), sizes)

    def process(role: RoleName, number: int, local: int, first: int, count: int, part: int = 0) -> ProcessPlacement:
        held = tuple(range(first, first + count)) if cluster.gpus_per_node else ()
        nics = tuple(dict.fromkeys(cluster.nics[gpu] for gpu in held)) if cluster.nics else ()
        index = local + (len(ranks) if role == "rollout" else 0)
        return ProcessPlacement(
            role, number, node, local, held, cores[index], nics, cluster.base_port + 1 + index, part
        )

    for local, rank in enumerate(ranks):
        yield process("trainer", rank, local, local, 1)
    first = len(ranks)
    for local, (engine, size) in enumerate(engines):
        part = parts.get(engine, 0)
        parts[engine] = part + 1
        yield process("rollout", engine, local, first, size, part)
        first += size


def _claims(config: Config) -> CoreRequest:
    return CoreRequest(config.cluster.gpus_per_node, config.cluster.trainer_cores, config.trainer.image_workers)


@dataclass(frozen=True)
class _Shape:
    """What the cores of a node's processes follow from; nodes are few kinds, so that each is worked out once."""

    cores: tuple[str, ...]
    gpu_numa: tuple[int, ...]
    claims: CoreRequest


@lru_cache(maxsize=64)
def _node_cores(shape: _Shape, ranks: int, engines: tuple[int, ...]) -> tuple[Cores, ...]:
    """Cores of each process of a node: `ranks` of the trainer, then engines of the given numbers of processes."""
    return assign_cores(shape.cores, shape.gpu_numa, shape.claims, ranks, engines)


def _rings(config: Config, processes: Sequence[ProcessPlacement]) -> Iterator[RingPlacement]:
    nodes = range(config.cluster.nodes)
    workers: list[list[int]] = [[] for _ in nodes]
    ranks: list[list[int]] = [[] for _ in nodes]
    for process in processes:
        if process.role == "trainer":
            ranks[process.node].append(process.index)
        elif process.follower == 0:
            workers[process.node].append(process.index)
    for node in nodes:
        yield RingPlacement(node, ring_name(config, node), tuple(workers[node]), tuple(ranks[node]))
