"""Distributes the groups of an update to all trainer ranks, on one node or several.

On several, the leader of each node reads its ring and sends every record, stripped of its screenshots, to rank 0. Rank
0 assembles groups, selects those of an update and broadcasts their stripped records to all ranks. Screenshots stay
where they are, in the image cache, until the plan of the update says which rank makes their pixels. docs/packing.md
draws the path of an episode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import FOLDER as DAMAGED_FOLDER
from megatron_webrl.ring.record import Buffer, decode_trajectory, encode_trajectory, read_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, RankMessage, RankMessenger
from megatron_webrl.trainer.multi_node.screenshots import (
    ImageCache,
    ImageShard,
    ImageTransferStats,
    restore_images,
    strip_images,
)
from megatron_webrl.trainer.parallel import broadcast_object, collective_timeout_seconds
from megatron_webrl.types import Group, Trajectory

MESSAGE_TIMEOUT_SECONDS = 120.0  # limit of one message between trainer ranks
Value = TypeVar("Value")
SelectedGroups = Sequence[tuple[Group, list[int]]]  # the groups of an update with the numbers of their records


class CollectInterrupt(Enum):
    """Why rank 0 returns no groups yet."""

    STOP = "an early end was requested"
    NEW_ENGINES = "an engine waits for weights"


class RecordSource(Protocol):
    """The records that rank 0 reads: of its node's ring, or of all nodes' rings. See Ring."""

    def committed(self, seen: Container[int]) -> list[int]: ...

    def read(self, sequence: int, verify: bool = True) -> Buffer: ...

    def acknowledge(self, sequences: Iterable[int]) -> None: ...


class RecordExchange:
    """Exchange among ranks on one node: every rank reads the same ring and files."""

    topology = NodeTopology((0,), 0)  # identifies the files that this rank reads and writes: those of node 0
    image_cache: ImageCache | None = None  # on several nodes: where a packer finds screenshots

    @property
    def writes_node_files(self) -> bool:
        """Whether this rank writes the episode files of its node."""
        return torch.distributed.get_rank() == 0

    def broadcast_on_node(self, value: Value) -> Value:
        """The value of the rank that writes node files, on every rank of its node. Collective."""
        return broadcast_object(value)

    def all_gather_trajectories(self, local: Sequence[Trajectory]) -> list[Trajectory]:
        """Trajectories of all nodes, given those that every rank of a node has. Collective."""
        return list(local)

    def trajectories_to_store(self, groups: Iterable[Group]) -> list[Trajectory]:
        """Trajectories of an update, with images, that this rank must store. Only on ranks with writes_node_files."""
        return [trajectory for group in groups for trajectory in group.trajectories]

    def pop_metrics(self) -> dict[str, float]:
        """On rank 0: metrics of the last update by MLflow name."""
        return {}


class SingleNodeExchange(RecordExchange):
    """Single-node exchange: rank 0 selects records, and all ranks read them from the same ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    @property
    def record_source(self) -> RecordSource:
        """The records that rank 0 reads."""
        return self._ring

    def broadcast_groups(self, selected: SelectedGroups | CollectInterrupt | None) -> list[Group] | CollectInterrupt:
        """Rank 0's selection, on every rank; other ranks pass None. Collective."""
        numbers: CollectInterrupt | Mapping[int, list[int]] | None = None
        if isinstance(selected, CollectInterrupt):
            numbers = selected
        elif selected is not None:
            numbers = {group.ticket: sequences for group, sequences in selected}
        shared = broadcast_object(numbers)
        assert shared is not None
        if isinstance(shared, CollectInterrupt):
            return shared
        if selected is not None and not isinstance(selected, CollectInterrupt):
            return [group for group, _ in selected]
        return [
            Group(ticket, tuple(decode_trajectory(self._ring.read(s, verify=False)) for s in sequences))
            for ticket, sequences in shared.items()
        ]

    def finish_collecting(self) -> None:
        """Tell all ranks that rank 0 reads no more records; nothing to do on one node. Collective."""

    def close(self) -> None:
        """Detach from the ring."""
        self._ring.close()


class MultiNodeExchange(RecordExchange):
    """Life cycle: per update `broadcast_groups` on every rank, then any other method; `finish_collecting` and `close`.

    While rank 0 polls for groups (GroupSource calls `committed`), the leaders serve it inside `broadcast_groups` or
    `finish_collecting`: in each poll rank 0 sends each leader the records to free and receives new ones. A record's
    number contains its node: sequence * node_count + node. It stays in its ring until rank 0 acknowledges it: after a
    restart of the trainer, its leader finds it and sends it again.
    """

    image_cache: ImageCache

    def __init__(self, ring: Ring, messenger: RankMessenger, image_cache: ImageCache, damaged_folder: Path) -> None:
        """`damaged_folder` receives the damaged records of this node's ring."""
        self._ring, self._messenger, self.image_cache = ring, messenger, image_cache
        self._damaged_folder = damaged_folder
        self.topology: NodeTopology = messenger.topology
        self._sent: set[int] = set()  # on a leader: sequences sent to rank 0 and not freed
        self._records: dict[int, bytes | memoryview] = {}  # on rank 0: stripped records by number
        self._to_free: dict[int, list[int]] = defaultdict(list)  # on rank 0: node -> sequences to free at the next poll
        self._node_of: dict[tuple[int, int], int] = {}  # (ticket, index) -> node, for the update's fresh episodes
        self._bytes = 0  # bytes of records and messages that this rank sent or received since the last update

    # -- on rank 0, while it polls for groups -----------------------------------------------------

    @property
    def record_source(self) -> RecordSource:
        """The records that rank 0 reads."""
        return self

    def committed(self, seen: Container[int]) -> list[int]:
        """Poll all leaders; numbers of the records that are not in `seen`."""
        others = [rank for rank in self.topology.node_leaders if rank != self.topology.rank]
        for leader in others:
            self._send_request(leader, "poll")
        self._free(self._to_free.pop(self.topology.node, []))
        self._add_records(self.topology.node, *self._new_records())
        for leader in others:
            message = self._messenger.receive(leader)
            self._bytes += sum(map(len, message.blobs))
            self._add_records(self.topology.node_of_rank[leader], message.content, message.blobs)
        return sorted(number for number in self._records if number not in seen)

    def read(self, sequence: int, verify: bool = True) -> bytes | memoryview:
        """A stripped record."""
        return self._records[sequence]

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Free records at the next poll."""
        for number in sequences:
            if self._records.pop(number, None) is not None:
                self._to_free[number % self.topology.node_count].append(number // self.topology.node_count)

    def _add_records(self, node: int, sequences: Sequence[int], records: Sequence[bytes | memoryview]) -> None:
        for sequence, record in zip(sequences, records, strict=True):
            self._records[sequence * self.topology.node_count + node] = record

    def _send_request(self, leader: int, request: str) -> None:
        sequences = self._to_free.pop(self.topology.node_of_rank[leader], [])
        self._bytes += self._messenger.send(leader, {"request": request, "free": sequences})

    # -- on a leader ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer the polls of rank 0 until it stops polling."""
        limit = self._messenger.collective_timeout_seconds  # between two polls rank 0 may wait for a service or a disk
        while True:
            request: dict[str, Any] = self._messenger.receive(0, limit).content
            self._free(request["free"])
            if request["request"] == "stop":
                return
            sequences, records = self._new_records()
            self._messenger.send(0, sequences, records)

    def _new_records(self) -> tuple[list[int], list[bytes]]:
        """Sequences and stripped records of this node's ring that were not sent yet; a damaged one is empty."""
        fresh = self._ring.committed(self._sent)
        self._sent.update(fresh)
        read = [read_trajectory(self._ring, sequence, self._damaged_folder) for sequence in fresh]
        return fresh, [b"".join(encode_trajectory(strip_images(each))) if each else b"" for each in read]

    def _free(self, sequences: Sequence[int]) -> None:
        if sequences:
            self._ring.acknowledge(sequences)
            self._sent.difference_update(sequences)

    # -- on every rank ----------------------------------------------------------------------------

    def broadcast_groups(self, selected: SelectedGroups | CollectInterrupt | None) -> list[Group] | CollectInterrupt:
        """Rank 0's selection, on every rank; other ranks pass None. Collective. Raises RankMessageError."""
        self._stop_polling()
        if selected is None:
            message = self._messenger.broadcast()
        elif isinstance(selected, CollectInterrupt):
            message = self._messenger.broadcast({"interrupt": selected.name})
        else:
            tickets = [[group.ticket, numbers] for group, numbers in selected]
            blobs = [self._records[number] for _, numbers in selected for number in numbers]
            self._bytes += (self.topology.node_count - 1) * sum(map(len, blobs))
            message = self._messenger.broadcast({"tickets": tickets}, blobs)
        if "interrupt" in message.content:
            return CollectInterrupt[message.content["interrupt"]]
        return self._decode_groups(message)

    def _decode_groups(self, message: RankMessage) -> list[Group]:
        """The groups of an update; registers their images in the cache."""
        self.image_cache.clear()
        self._node_of = {}
        records = iter(message.blobs)
        groups = []
        for ticket, numbers in message.content["tickets"]:
            trajectories = []
            for number in numbers:
                sequence, node = divmod(number, self.topology.node_count)
                trajectory = decode_trajectory(next(records))
                local = node == self.topology.node
                images = decode_trajectory(self._ring.read(sequence, verify=False)).images if local else ()
                self.image_cache.register(node, trajectory.images, images)
                self._node_of[ticket, trajectory.index] = node
                trajectories.append(trajectory)
            groups.append(Group(ticket, tuple(trajectories)))
        return groups

    def _stop_polling(self) -> None:
        """End the polls: leaders serve until rank 0 arrives here."""
        if self.topology.rank == 0:
            for leader in self.topology.node_leaders[1:]:
                self._send_request(leader, "stop")
            self._free(self._to_free.pop(self.topology.node, []))
        elif self.topology.is_node_leader:
            self._serve()

    @property
    def writes_node_files(self) -> bool:
        """Whether this rank writes the episode files of its node: its leader does."""
        return self.topology.is_node_leader

    def broadcast_on_node(self, value: Value) -> Value:
        """The value of the node's leader, which must be JSON, on every rank of the node. Collective on the node."""
        if not self.topology.is_node_leader:
            received: Value = self._messenger.receive(self.topology.node_leader(self.topology.node)).content
            return received
        for peer in self.topology.other_ranks_on_node(self.topology.rank):
            self._messenger.send(peer, value)
        return value

    def all_gather_trajectories(self, local: Sequence[Trajectory]) -> list[Trajectory]:
        """Stripped trajectories of all nodes, in node order; registers their images. Raises RankMessageError."""
        stripped = [strip_images(trajectory) for trajectory in local]
        keys = [key for each in stripped for key in each.images]
        self.image_cache.register(self.topology.node, keys, [image for each in local for image in each.images])
        records = [b"".join(encode_trajectory(each)) for each in stripped] if self.topology.is_node_leader else []
        message = self._all_gather_records(records)
        blobs, trajectories = iter(message.blobs), []
        for node, count in message.content:
            for _ in range(count):
                trajectories.append(decode_trajectory(next(blobs)))
                if node != self.topology.node:
                    self.image_cache.register(node, trajectories[-1].images)
        return trajectories

    def _all_gather_records(self, records: Sequence[bytes]) -> RankMessage:
        """The leaders' records, on every rank: [[node, number of its records], ...] and the records."""
        if self.topology.rank != 0:
            if self.topology.is_node_leader:
                self._messenger.send(0, None, records)
            return self._messenger.broadcast()
        by_node: dict[int, Sequence[bytes | memoryview]] = {self.topology.node: records}
        for leader in self.topology.node_leaders[1:]:
            received = self._messenger.receive(leader).blobs
            by_node[self.topology.node_of_rank[leader]] = received
            self._bytes += sum(map(len, received))
        nodes = sorted(by_node)
        blobs = [blob for node in nodes for blob in by_node[node]]
        self._bytes += (self.topology.node_count - 1) * sum(map(len, blobs))
        return self._messenger.broadcast([[node, len(by_node[node])] for node in nodes], blobs)

    def trajectories_to_store(self, groups: Iterable[Group]) -> list[Trajectory]:
        """The trajectories, with images, that came from this node's ring."""
        return [
            restore_images(trajectory, self.image_cache.get)
            for group in groups
            for trajectory in group.trajectories
            if self._node_of[group.ticket, trajectory.index] == self.topology.node
        ]

    def pop_metrics(self) -> dict[str, float]:
        """Traffic since the last call, MiB, and the fraction of screenshots that were local: see docs/packing.md."""
        stats, other = self.image_cache.transfer_stats, self._bytes
        self._bytes, self.image_cache.transfer_stats = 0, ImageTransferStats()
        needed, transferred = stats.needed_bytes, stats.transferred_bytes
        return {
            "nodes/images_mib": needed / 2**20,
            "nodes/remote_images_mib": transferred / 2**20,
            "nodes/local_fraction": 1 - transferred / needed if needed else 1.0,
            "nodes/other_mib": other / 2**20,
        }

    def finish_collecting(self) -> None:
        """Tell all ranks that rank 0 reads no more records. Collective."""
        self._stop_polling()

    def close(self) -> None:
        """Detach from the ring."""
        self._ring.close()


def make_exchange(
    ring: Ring, topology: NodeTopology, config: Config, sequence_packer: SequencePacker
) -> SingleNodeExchange | MultiNodeExchange:
    """The exchange of a job, given this node's ring; on several nodes the packer needs its image cache. Collective."""
    if config.cluster.nodes == 1:
        return SingleNodeExchange(ring)
    messenger = RankMessenger(topology, MESSAGE_TIMEOUT_SECONDS, collective_timeout_seconds(config))
    image_rank = sequence_packer.image_rank if sequence_packer.encodes_images else None
    image_cache = ImageCache(messenger, ImageShard(sequence_packer.data_parallel_rank, image_rank))
    damaged = config.run_folder / DAMAGED_FOLDER / f"node-{topology.node}"
    return MultiNodeExchange(ring, messenger, image_cache, damaged)
