"""Placement: the node, devices, cores and port of every process, and the rings, from a configuration.

Pure functions: no machine is read, so every node computes the same placement. docs/slurm.md describes cluster.*.
Ranks are numbered in Megatron's order "tp-cp-ep-dp-pp", tp fastest, but nodes assigned by group: a model copy, else a
stage of it, else a context-parallel, else a tensor-parallel group lies inside one node where it fits. A stage of a copy
has ranks for all of its experts. Engines are placed likewise: whole where they fit, else by pipeline stage.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.cores import assign_cores
from megatron_webrl.ring.segment import segment_name


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process among the trainer's processes, from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> RankInfo:
        """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them, or their Slurm counterparts. Raises KeyError."""
        if "RANK" in os.environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        else:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        rank, world_size, local_rank = (int(os.environ[name]) for name in names)
        return cls(rank, world_size, local_rank)


def check_gpu_sharing(config: Config) -> None:
    """Raise ConfigError for settings that need another placement of the two roles on GPUs."""
    cluster, rollout, transport = config.cluster, config.rollout, config.weights.transport
    if config.evaluation.only:
        return
    if transport == "nccl" and not cluster.gpus_per_node:
        raise ConfigError(
            "weights.transport=nccl needs GPUs, but cluster.gpus_per_node=0; set cluster.*, or weights.transport=auto"
        )
    if not cluster.colocate:
        return
    if not cluster.gpus_per_node:
        raise ConfigError(
            "cluster.colocate=true has no effect with cluster.gpus_per_node=0; set cluster.gpus_per_node too (and "
            "model.platform=cpu to compute without GPUs)"
        )
    if transport == "nccl":
        raise ConfigError(
            "weights.transport=nccl with cluster.colocate=true: NCCL refuses two ranks on one GPU; set "
            "weights.transport=auto"
        )
    if cluster.engine_gpus_per_node:
        raise ConfigError(
            f"cluster.engine_gpus_per_node={cluster.engine_gpus_per_node} has no effect with cluster.colocate=true, "
            "which gives engines every GPU; leave it out"
        )
    if not rollout.kv_cache_mib:
        raise ConfigError(
            "rollout.kv_cache_mib=0 with cluster.colocate=true: vLLM cannot measure the free memory of a GPU on "
            "which the trainer allocates; set its size"
        )


def gpu_memory_share(config: Config, role: str) -> float:
    """Fraction of a GPU's memory for an engine's rank (role "engine") or a rank of the trainer (any other role)."""
    if not config.cluster.colocate or config.evaluation.only:
        return 1.0
    engine = config.rollout.gpu_memory_utilization
    return engine if role == "engine" else 1.0 - engine


RoleName = Literal["trainer", "rollout"]
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ProcessPlacement:
    """One process: a trainer rank, a worker with its engine and browsers, or a follower of an engine."""

    role: RoleName
    index: int  # of the rank or worker
    node: int
    local_rank: int  # index among the processes of its role on the node
    devices: tuple[int, ...]  # GPUs of the node
    cores: tuple[int, ...]  # of the node; empty: any
    nics: tuple[str, ...]  # nearest to its devices; empty: NCCL chooses
    port: int  # unique on the node
    follower: int = 0  # of an engine over several nodes: index of the node in the engine; 0: the worker

    @property
    def name(self) -> str:
        """Name in logs and in the control service."""
        return rollout_process_name(self.index, self.follower) if self.role == "rollout" else f"trainer-{self.index}"


@dataclass(frozen=True)
class RingPlacement:
    """The ring of one node."""

    node: int
    name: str
    workers: tuple[int, ...]  # writers
    ranks: tuple[int, ...]  # readers


@dataclass(frozen=True)
class RankBlocks:
    """Sizes in ranks of the groups that should lie inside one node, from large to small."""

    model_copy: int  # the whole model, all experts included
    stage: int  # one pipeline stage of a copy
    context: int  # tensor- times context-parallel
    tensor: int

    @classmethod
    def from_config(cls, config: Config) -> RankBlocks:
        """The sizes for a trainer."""
        trainer = config.trainer
        context = trainer.tensor_parallel * trainer.context_parallel
        stage = math.lcm(context, trainer.expert_parallel * trainer.expert_tensor_parallel)
        return cls(stage * trainer.pipeline_parallel, stage, context, trainer.tensor_parallel)


@dataclass(frozen=True)
class Placement:
    """All processes of a job by node, trainer ranks first on each node."""

    nodes: int
    control_port: int  # of the control service, on the first node
    processes: tuple[ProcessPlacement, ...]
    rings: tuple[RingPlacement, ...]  # of each node; none without a trainer

    def on_node(self, node: int) -> tuple[ProcessPlacement, ...]:
        """The processes of a node."""
        return self._by_node[node]

    def of_role(self, role: RoleName) -> tuple[ProcessPlacement, ...]:
        """The processes of a role in the order of their indices."""
        found = [process for process in self.processes if process.role == role]
        return tuple(sorted(found, key=lambda process: (process.index, process.follower)))

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self) | {"processes": [asdict(each) | {"name": each.name} for each in self.processes]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Placement:
        """The placement that `to_json` returned."""

        def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}

        plain = [{key: value for key, value in each.items() if key != "name"} for each in fields["processes"]]
        processes = tuple(ProcessPlacement(**tuples(each)) for each in plain)
        rings = tuple(RingPlacement(**tuples(each)) for each in fields["rings"])
        return cls(fields["nodes"], fields["control_port"], processes, rings)

    @cached_property
    def _by_node(self) -> tuple[tuple[ProcessPlacement, ...], ...]:
        found: list[list[ProcessPlacement]] = [[] for _ in range(self.nodes)]
        for process in self.processes:
            found[process.node].append(process)
        return tuple(map(tuple, found))


def place_processes(config: Config) -> Placement:
    """Place all processes of a configuration. Raises ConfigError, in one line, if that is impossible."""
    cluster = config.cluster
    _check_cluster_settings(config)
    training, serving = _ranks_per_node(config)
    blocks = RankBlocks.from_config(config)
    copies = (blocks.model_copy, blocks.stage, blocks.context)
    ranks = _distribute(_ranks_by_copy(config, blocks), copies, blocks.tensor, training, cluster.nodes)
    slots = range(config.rollout.engines * config.ranks_per_engine)
    engines = _distribute(slots, (config.ranks_per_engine,), config.rollout.tensor_parallel, serving, cluster.nodes)
    node_counts: dict[int, int] = {}  # nodes of each engine so far
    processes: list[ProcessPlacement] = []
    for node in range(cluster.nodes):
        shares = Counter(slot // config.ranks_per_engine for slot in engines[node])  # ranks of each engine on the node
        processes += _processes(config, node, ranks[node], list(shares.items()), node_counts)
    last = max(process.port for process in processes)
    if last > 65535:
        raise ConfigError(
            f"cluster.base_port={cluster.base_port} and the processes of a node need ports up to {last}; lower it"
        )
    rings = () if config.evaluation.only else tuple(_rings(config, processes))
    return Placement(cluster.nodes, cluster.base_port, tuple(processes), rings)


def check_cluster(config: Config) -> None:
    """Raise ConfigError if the configuration cannot be placed on the machines that it describes."""
    if config.cluster != ClusterConfig():
        place_processes(config)
    else:
        check_gpu_sharing(config)


def visible_devices(devices: Sequence[int], allocated: str, gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES of `devices` among the `allocated` GPUs; empty: all `gpus`. Raises ConfigError for fewer."""
    names = allocated.split(",") if allocated else [str(number) for number in range(gpus)]
    if len(names) < gpus:
        raise ConfigError(
            f"cluster.gpus_per_node={gpus}, but {DEVICES_VARIABLE}={allocated} allows {len(names)}; allow more (in a "
            "Slurm job with --gpus-per-node), or lower cluster.gpus_per_node"
        )
    return ",".join(names[device] for device in devices)


def ring_name(config: Config, node: int) -> str:
    """The name of a node's ring in a job of several nodes. Raises ConfigError for an unknown node."""
    check_node_number(config, node)
    return segment_name(config.run.name, f"node {node}")


def rollout_process_name(worker: int, follower: int) -> str:
    """Name of a worker, or of a follower of its engine, in logs and in the control service; follower 0: the worker."""
    return f"rollout-{worker}" + (f".follower-{follower}" if follower else "")


def worker_name_of(name: str) -> str:
    """The worker's name of a rollout process; other names unchanged."""
    return name.partition(".follower-")[0]


def check_node_number(config: Config, node: int) -> None:
    """Raise ConfigError for a node number that the cluster does not have."""
    if not 0 <= node < config.cluster.nodes:
        raise ConfigError(f"--node={node} is not one of the {config.cluster.nodes} nodes (cluster.nodes), from 0")


def _check_cluster_settings(config: Config) -> None:
    cluster = config.cluster
    check_gpu_sharing(config)
    if not cluster.gpus_per_node:
        for name in ("engine_gpus_per_node", "nics", "gpu_gib"):
            if (value := getattr(cluster, name)) != getattr(ClusterConfig(), name):
                raise ConfigError(
                    f"cluster.{name}={value} has no effect with cluster.gpus_per_node=0; set cluster.gpus_per_node too"
                )
        return
    if config.model.platform == "cpu" and not cluster.colocate:  # roles that share GPUs may share the CPU as well
        raise ConfigError(
            f"cluster.gpus_per_node={cluster.gpus_per_node} with model.platform=cpu: set cluster.gpus_per_node=0, "
            "or platform to auto"
        )
    shared = config.evaluation.only or cluster.colocate
    if not shared and not 1 <= cluster.engine_gpus_per_node < cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.engine_gpus_per_node={cluster.engine_gpus_per_node} of "
            f"cluster.gpus_per_node={cluster.gpus_per_node} must leave each role at least one GPU of a node; "
            f"choose 1 to {cluster.gpus_per_node - 1}"
        )
    if cluster.nics and len(cluster.nics) != cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.nics has {len(cluster.nics)} entries for cluster.gpus_per_node={cluster.gpus_per_node}; give one "
            "for each GPU"
        )


def _ranks_per_node(config: Config) -> tuple[int, int]:
    """Trainer ranks and engine ranks per node. Raises ConfigError if a role does not fill its GPUs."""
    cluster, trainer, rollout = config.cluster, config.trainer, config.rollout
    serving = rollout.engines * config.ranks_per_engine
    dp, replica = trainer.data_parallel, config.trainer_world_size // trainer.data_parallel
    for name, ranks, size, share, value in (
        ("trainer.data_parallel", config.trainer_world_size, replica, config.trainer_gpus_per_node, dp),
        ("rollout.engines", serving, config.ranks_per_engine, config.engine_gpus_per_node, rollout.engines),
    ):
        if cluster.gpus_per_node and ranks != cluster.nodes * share:
            n, left = divmod(cluster.nodes * share, size)
            every = config.evaluation.only or cluster.colocate
            gpus = "cluster.nodes" if every else "cluster.engine_gpus_per_node"
            way = f"set it to {n}" if n and not left else f"change {gpus} or the parallel sizes"
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


def _ranks_by_copy(config: Config, blocks: RankBlocks) -> list[int]:
    """All trainer ranks, ordered by model copy and within a copy by stage."""
    stages = config.trainer.pipeline_parallel
    share = config.trainer_world_size // stages  # ranks of a stage, over all copies
    if share % blocks.stage:
        raise ConfigError(
            f"trainer.expert_parallel x expert_tensor_parallel needs {blocks.stage} ranks for each copy of the "
            f"experts, which do not divide the {share} ranks of a pipeline stage; lower expert_parallel or raise "
            "data_parallel"
        )
    copies = range(0, share, blocks.stage)
    return [stage * share + first + i for first in copies for stage in range(stages) for i in range(blocks.stage)]


def _distribute(order: Sequence[int], blocks: Sequence[int], smallest: int, room: int, nodes: int) -> list[list[int]]:
    """Distribute `order` over nodes, `room` items each: large blocks whole where they fit, the rest in smaller blocks.

    Each block size is a multiple of the next, and `smallest` divides `room`.
    """
    assigned: list[list[int]] = [[] for _ in range(nodes)]
    left = list(order)
    for block in (*blocks, smallest):
        node, rest = 0, []
        for start in range(0, len(left), block):
            while node < len(assigned) and room - len(assigned[node]) < block:
                node += 1
            if node < len(assigned):
                assigned[node] += left[start : start + block]
            else:
                rest += left[start : start + block]
        left = rest
    return assigned


def _processes(
    config: Config, node: int, ranks: Sequence[int], engines: Sequence[tuple[int, int]], node_counts: dict[int, int]
) -> Iterator[ProcessPlacement]:
    """The processes of one node. `node_counts`: nodes that each engine has so far; updated."""
    cluster, cores = config.cluster, assign_cores(config, len(ranks), [size for _, size in engines])

    def process(role: RoleName, number: int, local: int, first: int, count: int, follower: int = 0) -> ProcessPlacement:
        devices = tuple(range(first, first + count)) if cluster.gpus_per_node else ()
        nics = tuple(dict.fromkeys(cluster.nics[gpu] for gpu in devices)) if cluster.nics else ()
        index = local + (len(ranks) if role == "rollout" else 0)
        return ProcessPlacement(
            role, number, node, local, devices, cores[index], nics, cluster.base_port + 1 + index, follower
        )

    for local, rank in enumerate(ranks):
        yield process("trainer", rank, local, local, 1)
    first = 0 if cluster.colocate else len(ranks)
    for local, (engine, size) in enumerate(engines):
        follower = node_counts.get(engine, 0)
        node_counts[engine] = follower + 1
        yield process("rollout", engine, local, first, size, follower)
        first += size


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
