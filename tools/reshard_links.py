"""Bytes on the links of a cluster and their transfer time, for tools/simulate_reshard.py."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan

ITEM_BYTES = 2  # bfloat16


class GpuSlot(NamedTuple):
    """The GPU of a rank."""

    node: int
    number: int


class LinkDirection(NamedTuple):
    """One direction of a port."""

    kind: str  # "NVLink" or "NIC"
    direction: str  # "out" or "in"
    node: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of node {self.node}, {self.direction}"


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of equal nodes. Speeds are bytes per second in one direction of a GPU's NVLink port or of a NIC."""

    nodes: int
    gpus: int  # per node
    nics: int  # per node, shared evenly by its GPUs
    nvlink: float
    nic: float
    latency: float  # seconds per message

    def links(self, sender: GpuSlot, receiver: GpuSlot) -> tuple[LinkDirection, ...]:
        """The links on a message's way; none within one GPU."""
        if sender == receiver:
            return ()
        if sender.node == receiver.node:
            return (LinkDirection("NVLink", "out", *sender), LinkDirection("NVLink", "in", *receiver))
        return (self._nic("out", sender), self._nic("in", receiver))

    def _nic(self, direction: str, gpu: GpuSlot) -> LinkDirection:
        return LinkDirection("NIC", direction, gpu.node, gpu.number * self.nics // self.gpus)

    def transfer_seconds(self, link: LinkDirection, size: int) -> float:
        """Seconds that `size` bytes take on a link."""
        return size / (self.nvlink if link.kind == "NVLink" else self.nic)


@dataclass(frozen=True)
class ReshardLayout:
    """Parallel sizes and placement of trainer and engines."""

    trainer: ParallelSizes
    engine: EngineSizes
    trainer_gpus: int  # per node with trainer ranks
    trainer_nodes: int = 0  # nodes of the trainer alone; 0: trainer and engines share every node


@dataclass(frozen=True)
class RankPlacement:
    """The GPU of each rank."""

    trainer: tuple[GpuSlot, ...]
    engines: tuple[tuple[GpuSlot, ...], ...]


@dataclass(frozen=True)
class TransferPrediction:
    """Prediction for one transfer method."""

    seconds: float
    busiest: LinkDirection
    busiest_bytes: int
    nic_out: int  # most bytes sent through one NIC
    nic_in: int
    received: int  # bytes, by all engine ranks
    messages: int  # of the rank with the most


def place_ranks(cluster: ClusterSpec, layout: ReshardLayout) -> RankPlacement:
    """Assign a GPU to every rank, node by node, trainer ranks first on each node. Raises ValueError."""
    gpus = cluster.gpus
    if not 1 <= layout.trainer_gpus <= gpus - (not layout.trainer_nodes):
        raise ValueError(f"{layout.trainer_gpus} of {gpus} GPUs of a node for the trainer: each side needs at least 1")
    if layout.trainer_nodes >= cluster.nodes:
        raise ValueError(f"{layout.trainer_nodes} of {cluster.nodes} nodes for the trainer leave none for engines")
    training = range(layout.trainer_nodes or cluster.nodes)
    trainer = tuple(GpuSlot(node, number) for node in training for number in range(layout.trainer_gpus))
    first = 0 if layout.trainer_nodes else layout.trainer_gpus
    free = [GpuSlot(n, i) for n in range(layout.trainer_nodes, cluster.nodes) for i in range(first, gpus)]
    ranks, share = layout.engine.ranks, gpus - first
    if share % ranks and ranks % share:
        raise ValueError(f"engines of {ranks} GPUs do not fit {share} GPUs of each node: neither divides the other")
    if len(free) % ranks:
        raise ValueError(f"engines of {ranks} GPUs do not divide {len(free)} GPUs")
    return RankPlacement(trainer, tuple(tuple(free[i : i + ranks]) for i in range(0, len(free), ranks)))


def make_transfer_plan(
    description: Any, layout: ReshardLayout, placement: RankPlacement, staging_bytes: int
) -> TransferPlan:
    """The transfer plan of a run with this placement."""
    trainer = TrainerTopology(layout.trainer, len(placement.trainer), tuple(str(gpu.node) for gpu in placement.trainer))
    nodes = tuple(tuple(str(gpu.node) for gpu in engine) for engine in placement.engines)
    return TransferPlan(description, trainer, EngineTopology.uniform(layout.engine, nodes), ITEM_BYTES, staging_bytes)


def predict_shard_to_shard(plan: TransferPlan, cluster: ClusterSpec, placement: RankPlacement) -> TransferPrediction:
    """The transfer by the plan."""
    used: dict[LinkDirection, int] = defaultdict(int)
    messages: dict[GpuSlot, int] = defaultdict(int)
    for engine, gpus in enumerate(placement.engines):
        for (sender, receiver), size in plan.bytes_by_pair(engine).items():
            source, target = placement.trainer[sender], gpus[receiver]
            for link in cluster.links(source, target):
                used[link] += size
            for gpu in (source, target):
                messages[gpu] += math.ceil(size / plan.max_message_bytes)
    received = sum(plan.received_bytes(engine) for engine in range(len(placement.engines)))
    return predict_transfer(cluster, used, received, max(messages.values()))


def predict_broadcast(
    description: Any, layout: ReshardLayout, cluster: ClusterSpec, placement: RankPlacement, staging: int
) -> TransferPrediction:
    """Gather the full model on the first trainer rank, then pass it around a ring of engine ranks."""
    first = placement.trainer[0]
    gather = make_transfer_plan(
        description, replace(layout, engine=EngineSizes()), replace(placement, engines=((first,),)), staging
    )
    used: dict[LinkDirection, int] = defaultdict(int)
    for (sender, _), size in gather.bytes_by_pair(0).items():
        for link in cluster.links(placement.trainer[sender], first):
            used[link] += size
    ring = [first, *sorted({gpu for engine in placement.engines for gpu in engine})]
    model = gather.received_bytes(0)
    for source, target in itertools.pairwise(ring):
        for link in cluster.links(source, target):
            used[link] += model
    messages = math.ceil(model / gather.max_message_bytes) + len(ring) - 1  # the last rank waits for all earlier ones
    return predict_transfer(cluster, used, model * (len(ring) - 1), messages)


def predict_transfer(
    cluster: ClusterSpec, used: Mapping[LinkDirection, int], received: int, messages: int
) -> TransferPrediction:
    """Predict a transfer from the bytes on each link and the messages of its longest chain."""
    busiest = max(used, key=lambda link: (cluster.transfer_seconds(link, used[link]), used[link]))

    def most(direction: str) -> int:
        return max((n for link, n in used.items() if link[:2] == ("NIC", direction)), default=0)

    seconds = cluster.transfer_seconds(busiest, used[busiest]) + cluster.latency * messages
    return TransferPrediction(seconds, busiest, used[busiest], most("out"), most("in"), received, messages)
