"""The rings of several nodes as one source of groups. docs/packing.md draws the way of an episode.

A reader on each node looks at its ring and tells the first rank of every record in outline (outline.py). The first
rank assembles groups of outlines, chooses, and has the outlines of the update told to all ranks. Screenshots stay where
they are, on a shelf, until the plan of the update says who makes pixels of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.exchange.node_topology import NodeTopology
from megatron_webrl.trainer.exchange.rank_messages import RankMessage, RankMessenger
from megatron_webrl.trainer.exchange.record_exchange import (
    CollectInterrupt,
    RecordExchange,
    RecordSource,
    SelectedGroups,
    SingleNodeExchange,
)
from megatron_webrl.trainer.images.image_cache import ImageCache, ImageShard, ImageTransferStats
from megatron_webrl.trainer.images.image_keys import restore_images, strip_images
from megatron_webrl.trainer.parallel import collective_timeout_seconds
from megatron_webrl.types import Group, Trajectory

Value = TypeVar("Value")


def make_exchange(
    ring: Ring, nodes: NodeTopology, config: Config, builder: SequencePacker
) -> SingleNodeExchange | MultiNodeExchange:
    """The rings of a job, of which `ring` is this node's. Collective. A builder on several nodes needs their shelf."""
    if config.cluster.nodes == 1:
        return SingleNodeExchange(ring)
    wire = RankMessenger(nodes, config.ring.exchange_timeout_seconds, collective_timeout_seconds(config))
    shelf = ImageCache(
        wire, ImageShard(builder.data_parallel_rank, builder.image_rank if builder.encodes_images else None)
    )
    return MultiNodeExchange(ring, wire, shelf)


class MultiNodeExchange(RecordExchange):
    """Life: per update `share` on every rank; then whatever needs the episodes; `end`, `close` at the end.

    While the first rank looks for groups (`committed`, by GroupSource), the readers serve it within `share` or `end`:
    per turn it tells each which records are done with, and hears of those that have come. The number of a record says
    its node: sequence * nodes + node.

    A record stays in its ring until the first rank acknowledges it, whatever becomes of any rank: a restarted reader
    finds it again, and tells of it again.
    """

    def __init__(self, ring: Ring, wire: RankMessenger, shelf: ImageCache) -> None:
        self._ring, self._wire, self.image_cache = ring, wire, shelf
        self.topology: NodeTopology = wire.topology
        self._told: set[int] = set()  # at a reader: sequences told of and not acknowledged
        self._outlines: dict[int, bytes | memoryview] = {}  # at the first rank: of all records told of, by number
        self._done: dict[int, list[int]] = defaultdict(list)  # there: node -> sequences, to be told in the next turn
        self._home: dict[tuple[int, int], int] = {}  # (ticket, index) -> node, of the update's fresh episodes
        self._bytes = 0  # of outlines and orders, that this rank sent since the last update

    # -- at the first rank, while it looks for groups ---------------------------------------------

    @property
    def record_source(self) -> RecordSource:
        """For the first rank."""
        return self

    def committed(self, seen: Container[int]) -> list[int]:
        """One turn with all readers."""
        others = [rank for rank in self.topology.node_leaders if rank != self.topology.rank]
        for reader in others:
            self._order(reader, "look")
        self._apply(self._done.pop(self.topology.node, []))
        self._learn(self.topology.node, *self._arrivals())
        for reader in others:
            message = self._wire.receive(reader)
            self._bytes += sum(map(len, message.blobs))
            self._learn(self.topology.node_of_rank[reader], message.content, message.blobs)
        return sorted(number for number in self._outlines if number not in seen)

    def read(self, sequence: int, verify: bool = True) -> bytes | memoryview:
        """The outline of a record: a record itself."""
        return self._outlines[sequence]

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Free records at the next turn."""
        for number in sequences:
            if self._outlines.pop(number, None) is not None:
                self._done[number % self.topology.node_count].append(number // self.topology.node_count)

    def _learn(self, node: int, sequences: Sequence[int], outlines: Sequence[bytes | memoryview]) -> None:
        for sequence, record in zip(sequences, outlines, strict=True):
            self._outlines[sequence * self.topology.node_count + node] = record

    def _order(self, reader: int, what: str) -> None:
        done = self._done.pop(self.topology.node_of_rank[reader], [])
        self._bytes += self._wire.send(reader, {"order": what, "done": done})

    # -- at a reader ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Do what the first rank orders, until it has found what it looked for."""
        limit = self._wire.collective_timeout_seconds  # the first rank may have other work before it begins to look
        while True:
            order: dict[str, Any] = self._wire.receive(0, limit).content
            limit = self._wire.timeout_seconds
            self._apply(order["done"])
            if order["order"] == "leave":
                return
            sequences, outlines = self._arrivals()
            self._wire.send(0, sequences, outlines)

    def _arrivals(self) -> tuple[list[int], list[bytes]]:
        """Records of this node's ring that have not been told of: sequences and outlines."""
        sequences = self._ring.committed(self._told)
        self._told.update(sequences)
        return sequences, [
            b"".join(encode_trajectory(strip_images(decode_trajectory(self._ring.read(s))))) for s in sequences
        ]

    def _apply(self, done: Sequence[int]) -> None:
        if done:
            self._ring.acknowledge(done)
            self._told.difference_update(done)

    # -- on every rank ----------------------------------------------------------------------------

    def broadcast_groups(self, chosen: SelectedGroups | CollectInterrupt | None) -> list[Group] | CollectInterrupt:
        """What the first rank has chosen, on every rank; the others give None. Collective. Raises WireError."""
        self._leave()
        if chosen is None:
            message = self._wire.broadcast()
        elif isinstance(chosen, CollectInterrupt):
            message = self._wire.broadcast({"interruption": chosen.name})
        else:
            tickets = [[group.ticket, numbers] for group, numbers in chosen]
            blobs = [self._outlines[number] for _, numbers in chosen for number in numbers]
            self._bytes += (self.topology.node_count - 1) * sum(map(len, blobs))
            message = self._wire.broadcast({"tickets": tickets}, blobs)
        if "interruption" in message.content:
            return CollectInterrupt[message.content["interruption"]]
        return self._take_over(message)

    def _take_over(self, message: RankMessage) -> list[Group]:
        """The groups of an update, their screenshots on the shelf."""
        self.image_cache.clear()
        self._home = {}
        outlines = iter(message.blobs)
        groups = []
        for ticket, numbers in message.content["tickets"]:
            trajectories = []
            for number in numbers:
                sequence, node = divmod(number, self.topology.node_count)
                trajectory = decode_trajectory(next(outlines))
                here = node == self.topology.node
                images = decode_trajectory(self._ring.read(sequence, verify=False)).images if here else ()
                self.image_cache.register(node, trajectory.images, images)
                self._home[ticket, trajectory.index] = node
                trajectories.append(trajectory)
            groups.append(Group(ticket, tuple(trajectories)))
        return groups

    def _leave(self) -> None:
        """End the turns: readers have served until the first rank comes here."""
        if self.topology.rank == 0:
            for reader in self.topology.node_leaders[1:]:
                self._order(reader, "leave")
            self._apply(self._done.pop(self.topology.node, []))
        elif self.topology.is_node_leader:
            self._serve()

    @property
    def writes_node_files(self) -> bool:
        """A reader stores what came from its node's ring."""
        return self.topology.is_node_leader

    def broadcast_on_node(self, value: Value) -> Value:
        """What the reader of the node says; JSON."""
        return self._wire.broadcast_on_node(value)

    def all_gather_trajectories(self, mine: Sequence[Trajectory]) -> list[Trajectory]:
        """The episodes of all nodes in outline, node by node; their screenshots go to the shelf. Raises WireError."""
        outlines = [strip_images(trajectory) for trajectory in mine]
        names = [name for each in outlines for name in each.images]
        self.image_cache.register(self.topology.node, names, [image for each in mine for image in each.images])
        records = [b"".join(encode_trajectory(each)) for each in outlines] if self.topology.is_node_leader else []
        if self.topology.rank == 0:
            found: dict[int, Sequence[bytes | memoryview]] = {self.topology.node: records}
            for reader in self.topology.node_leaders[1:]:
                found[self.topology.node_of_rank[reader]] = self._wire.receive(reader).blobs
                self._bytes += sum(map(len, found[self.topology.node_of_rank[reader]]))
            nodes = sorted(found)
            blobs = [blob for node in nodes for blob in found[node]]
            self._bytes += (self.topology.node_count - 1) * sum(map(len, blobs))
            message = self._wire.broadcast([[node, len(found[node])] for node in nodes], blobs)
        else:
            if self.topology.is_node_leader:
                self._wire.send(0, None, records)
            message = self._wire.broadcast()
        arrived, everyone = iter(message.blobs), []
        for node, count in message.content:
            for _ in range(count):
                everyone.append(decode_trajectory(next(arrived)))
                if node != self.topology.node:
                    self.image_cache.register(node, everyone[-1].images)
        return everyone

    def trajectories_to_store(self, groups: Iterable[Group]) -> list[Trajectory]:
        """Those that came from this node's ring."""
        return [
            restore_images(trajectory, self.image_cache.get)
            for group in groups
            for trajectory in group.trajectories
            if self._home[group.ticket, trajectory.index] == self.topology.node
        ]

    def gather_with_images(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Screenshots of other nodes are brought to the first rank."""
        names = [bytes(name) for each in trajectories for name in each.images]
        self._bytes += self.image_cache.fetch({0: names}).transferred_bytes
        return [restore_images(each, self.image_cache.get) for each in trajectories] if self.topology.rank == 0 else []

    def pop_metrics(self) -> dict[str, float]:
        """`nodes/images_mib`: that ranks made pixels of; `nodes/remote_images_mib`: those that came from another node;
        `nodes/local_fraction`: the share of the others; `nodes/other_mib`: all else that went between nodes.
        """
        moved, needed = self.image_cache.transfer_stats.transferred_bytes, self.image_cache.transfer_stats.needed_bytes
        other, self._bytes, self.image_cache.transfer_stats = self._bytes, 0, ImageTransferStats()
        return {
            "nodes/images_mib": needed / 2**20,
            "nodes/remote_images_mib": moved / 2**20,
            "nodes/local_fraction": 1 - moved / needed if needed else 1.0,
            "nodes/other_mib": other / 2**20,
        }

    def finish_collecting(self) -> None:
        """The first rank has looked for the last time. Collective."""
        self._leave()

    def close(self) -> None:
        """Let go of the memory."""
        self._ring.close()
