"""Bytes on the links of a cluster, and the time they take: what tools/simulate_reshard.py predicts with."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_webrl.model.layout import Sizes
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import Engines, Plan, Trainer

ITEM_BYTES = 2  # bfloat16


class Gpu(NamedTuple):
    """Where a rank runs."""

    node: int
    number: int


class Link(NamedTuple):
    """One direction of a port."""

    kind: str  # "NVLink" or "NIC"
    direction: str  # "out" or "in"
    node: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of node {self.node}, {self.direction}"


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. Speeds in bytes per second and direction: of a GPU's NVLink port, of a NIC."""

    nodes: int
    gpus: int  # of a node
    nics: int  # of a node, shared out over its GPUs
    nvlink: float
    nic: float
    latency: float  # seconds of a message

    def links(self, sender: Gpu, receiver: Gpu) -> tuple[Link, ...]:
        """The links that a message takes; none within a GPU."""
        if sender == receiver:
            return ()
        if sender.node == receiver.node:
            return (Link("NVLink", "out", *sender), Link("NVLink", "in", *receiver))
        return (self._nic("out", sender), self._nic("in", receiver))

    def _nic(self, direction: str, gpu: Gpu) -> Link:
        return Link("NIC", direction, gpu.node, gpu.number * self.nics // self.gpus)

    def seconds(self, link: Link, size: int) -> float:
        """Time of so many bytes on a link."""
        return size / (self.nvlink if link.kind == "NVLink" else self.nic)


@dataclass(frozen=True)
class Layout:
    """How both sides are split and where they are."""

    trainer: Sizes
    engine: EngineSizes
    trainer_gpus: int  # of each node that trains
    trainer_nodes: int = 0  # nodes for the trainer alone; 0: it shares every node with engines


@dataclass(frozen=True)
class Placement:
    """The GPU of each rank."""

    trainer: tuple[Gpu, ...]
    engines: tuple[tuple[Gpu, ...], ...]


@dataclass(frozen=True)
class Prediction:
    """One way to bring the weights to the engines."""

    seconds: float
    busiest: Link
    busiest_bytes: int
    nic_out: int  # most bytes that leave through one NIC
    nic_in: int
    received: int  # bytes, by all engine ranks
    messages: int  # of the rank that has most of them


def place(cluster: Cluster, layout: Layout) -> Placement:
    """Give every rank its GPU, node by node: on each node the trainer's come first. Raises ValueError."""
    gpus = cluster.gpus
    if not 1 <= layout.trainer_gpus <= gpus - (not layout.trainer_nodes):
        raise ValueError(f"{layout.trainer_gpus} of {gpus} GPUs of a node for the trainer: each side needs at least 1")
    if layout.trainer_nodes >= cluster.nodes:
        raise ValueError(f"{layout.trainer_nodes} of {cluster.nodes} nodes for the trainer leave none for engines")
    training = range(layout.trainer_nodes or cluster.nodes)
    trainer = tuple(Gpu(node, number) for node in training for number in range(layout.trainer_gpus))
    first = 0 if layout.trainer_nodes else layout.trainer_gpus
    free = [Gpu(n, i) for n in range(layout.trainer_nodes, cluster.nodes) for i in range(first, gpus)]
    ranks, share = layout.engine.ranks, gpus - first
    if share % ranks and ranks % share:
        raise ValueError(f"engines of {ranks} GPUs do not fit {share} GPUs of each node, nor do so many fit an engine")
    if len(free) % ranks:
        raise ValueError(f"engines of {ranks} GPUs do not share out {len(free)} GPUs")
    return Placement(trainer, tuple(tuple(free[i : i + ranks]) for i in range(0, len(free), ranks)))


def make_plan(description: Any, layout: Layout, placement: Placement, staging_bytes: int) -> Plan:
    """The plan that a run with this placement makes."""
    trainer = Trainer(layout.trainer, len(placement.trainer), tuple(str(gpu.node) for gpu in placement.trainer))
    nodes = tuple(tuple(str(gpu.node) for gpu in engine) for engine in placement.engines)
    return Plan(description, trainer, Engines.alike(layout.engine, nodes), ITEM_BYTES, staging_bytes)


def shard_to_shard(plan: Plan, cluster: Cluster, placement: Placement) -> Prediction:
    """The transfer by the plan."""
    used: dict[Link, int] = defaultdict(int)
    messages: dict[Gpu, int] = defaultdict(int)
    for engine, gpus in enumerate(placement.engines):
        for (sender, receiver), size in plan.traffic(engine).items():
            source, target = placement.trainer[sender], gpus[receiver]
            for link in cluster.links(source, target):
                used[link] += size
            for gpu in (source, target):
                messages[gpu] += math.ceil(size / plan.message_bytes)
    received = sum(plan.bytes(engine) for engine in range(len(placement.engines)))
    return predict(cluster, used, received, max(messages.values()))


def broadcast(description: Any, layout: Layout, cluster: Cluster, placement: Placement, staging: int) -> Prediction:
    """Gather the full model on the first trainer rank and pass it on around a ring."""
    first = placement.trainer[0]
    gather = make_plan(
        description, replace(layout, engine=EngineSizes()), replace(placement, engines=((first,),)), staging
    )
    used: dict[Link, int] = defaultdict(int)
    for (sender, _), size in gather.traffic(0).items():
        for link in cluster.links(placement.trainer[sender], first):
            used[link] += size
    ring = [first, *sorted({gpu for engine in placement.engines for gpu in engine})]
    model = gather.bytes(0)
    for source, target in itertools.pairwise(ring):
        for link in cluster.links(source, target):
            used[link] += model
    messages = math.ceil(model / gather.message_bytes) + len(ring) - 1  # the last rank waits for all before it
    return predict(cluster, used, model * (len(ring) - 1), messages)


def predict(cluster: Cluster, used: Mapping[Link, int], received: int, messages: int) -> Prediction:
    """The time of a transfer from the bytes on each link and the messages of its longest chain."""
    busiest = max(used, key=lambda link: (cluster.seconds(link, used[link]), used[link]))

    def most(direction: str) -> int:
        return max((n for link, n in used.items() if link[:2] == ("NIC", direction)), default=0)

    seconds = cluster.seconds(busiest, used[busiest]) + cluster.latency * messages
    return Prediction(seconds, busiest, used[busiest], most("out"), most("in"), received, messages)
