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
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import FOLDER as DAMAGED_FOLDER
from megatron_webrl.ring.record import decode_trajectory, encode_trajectory, read_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, RankMessenger
from megatron_webrl.trainer.multi_node.screenshots import ImageCache, ImageShard, restore_images, strip_images
from megatron_webrl.trainer.parallel import broadcast_object, collective_timeout_seconds, image_rank
from megatron_webrl.types import Group, Trajectory

MESSAGE_TIMEOUT_SECONDS = 120.0  # limit of one message between trainer ranks
ONE_NODE = NodeTopology((0,), 0)
SelectedGroups = list[tuple[Group, list[int]]]  # the groups of an update with the numbers of their records


class CollectInterrupt(Enum):
    """Why rank 0 returns no groups yet."""

    STOP = "an early end was requested"
    NEW_ENGINES = "an engine waits for weights"


class RecordExchange:
    """Exchange among ranks on one node: rank 0 selects records, and all ranks read the same ring and files."""

    image_cache: ImageCache | None = None  # on several nodes: where a packer finds screenshots

    def __init__(self, ring: Ring, topology: NodeTopology = ONE_NODE) -> None:
        """`topology` identifies the files that this rank reads and writes."""
        self._ring, self.topology = ring, topology

    @property
    def record_source(self) -> RecordSource:
        """The records that rank 0 reads."""
        return self._ring

    def broadcast_groups(self, selected: SelectedGroups | CollectInterrupt | None) -> list[Group] | CollectInterrupt:
        """Rank 0's selection, on every rank; other ranks pass None. Collective."""
        if isinstance(selected, list):
            broadcast_object([(group.ticket, sequences) for group, sequences in selected])
            return [group for group, _ in selected]
        shared: Any = broadcast_object(selected)
        if isinstance(shared, CollectInterrupt):
            return shared
        return [
            Group(ticket, tuple(decode_trajectory(self._ring.read(s, verify=False)) for s in sequences))
            for ticket, sequences in shared
        ]

    @property
    def writes_node_files(self) -> bool:
        """Whether this rank writes the episode files of its node."""
        return torch.distributed.get_rank() == 0

    def all_gather_trajectories(self, local: Sequence[Trajectory]) -> list[Trajectory]:
        """Trajectories of all nodes, given those that every rank of a node has. Collective."""
        return list(local)

    def trajectories_to_store(self, groups: Iterable[Group]) -> list[Trajectory]:
        """Trajectories of an update, with images, that this rank must store. Only on ranks with writes_node_files."""
        return [trajectory for group in groups for trajectory in group.trajectories]

    def pop_metrics(self) -> dict[str, float]:
        """On rank 0: metrics of the last update by MLflow name."""
        return {}

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
        super().__init__(ring, messenger.topology)
        self._messenger, self.image_cache, self._damaged_folder = messenger, image_cache, damaged_folder
        self._sent: set[int] = set()  # on a leader: sequences sent to rank 0 and not freed
        self._records: dict[int, bytes] = {}  # on rank 0: stripped records by number
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
        others = self.topology.node_leaders[1:]
        for leader in others:
            self._send_request(leader, "poll")
        self._free(self._to_free.pop(self.topology.node, []))
        self._add_records(self.topology.node, self._new_records())
        for leader in others:
            records = self._messenger.receive(leader)
            self._bytes += sum(map(len, records.values()))
            self._add_records(self.topology.node_of_rank[leader], records)
        return sorted(number for number in self._records if number not in seen)

    def read(self, sequence: int, verify: bool = True) -> bytes:
        """A stripped record."""
        return self._records[sequence]

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Free records at the next poll."""
        for number in sequences:
            if self._records.pop(number, None) is not None:
                self._to_free[number % self.topology.node_count].append(number // self.topology.node_count)

    def _add_records(self, node: int, records: Mapping[int, bytes]) -> None:
        for sequence, record in records.items():
            self._records[sequence * self.topology.node_count + node] = record

    def _send_request(self, leader: int, request: str) -> None:
        sequences = self._to_free.pop(self.topology.node_of_rank[leader], [])
        self._bytes += self._messenger.send(leader, (request, sequences))

    # -- on a leader ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer the polls of rank 0 until it stops polling."""
        limit = self._messenger.collective_timeout_seconds  # between two polls rank 0 may wait for a service or a disk
        while True:
            request, freed = self._messenger.receive(0, limit)
            self._free(freed)
            if request == "stop":
                return
            self._messenger.send(0, self._new_records())

    def _new_records(self) -> dict[int, bytes]:
        """Stripped records of this node's ring that were not sent yet, by sequence; a damaged one is empty."""
        fresh = self._ring.committed(self._sent)
        self._sent.update(fresh)
        read = {sequence: read_trajectory(self._ring, sequence, self._damaged_folder) for sequence in fresh}
        return {number: _stripped_record(each) if each else b"" for number, each in read.items()}

    def _free(self, sequences: Sequence[int]) -> None:
        if sequences:
            self._ring.acknowledge(sequences)
            self._sent.difference_update(sequences)

    # -- on every rank ----------------------------------------------------------------------------

    def broadcast_groups(self, selected: SelectedGroups | CollectInterrupt | None) -> list[Group] | CollectInterrupt:
        """Rank 0's selection, on every rank; other ranks pass None. Collective. Raises RankMessageError."""
        self._stop_polling()
        message: Any = selected
        if isinstance(selected, list):
            message = [(group.ticket, {number: self._records[number] for number in each}) for group, each in selected]
            sizes = (len(record) for _, records in message for record in records.values())
            self._bytes += (self.topology.node_count - 1) * sum(sizes)
        message = self._messenger.broadcast(message)
        if isinstance(message, CollectInterrupt):
            return message
        self.image_cache.clear()
        self._node_of = {}
        return [
            Group(ticket, tuple(self._decode(number, record) for number, record in records.items()))
            for ticket, records in message
        ]

    def _decode(self, number: int, record: bytes) -> Trajectory:
        """A trajectory of an update, whose images it registers in the cache."""
        sequence, node = divmod(number, self.topology.node_count)
        trajectory, local = decode_trajectory(record), node == self.topology.node
        images = decode_trajectory(self._ring.read(sequence, verify=False)).images if local else ()
        self.image_cache.register(node, trajectory.images, images)
        self._node_of[trajectory.ticket, trajectory.index] = node
        return trajectory

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

    def all_gather_trajectories(self, local: Sequence[Trajectory]) -> list[Trajectory]:
        """Stripped trajectories of all nodes, in node order; registers their images. Raises RankMessageError."""
        keys = [key for each in local for key in strip_images(each).images]
        self.image_cache.register(self.topology.node, keys, [image for each in local for image in each.images])
        trajectories = []
        for node, records in self._all_gather_records([_stripped_record(each) for each in local]).items():
            for trajectory in map(decode_trajectory, records):
                trajectories.append(trajectory)
                if node != self.topology.node:
                    self.image_cache.register(node, trajectory.images)
        return trajectories

    def _all_gather_records(self, own: Sequence[bytes]) -> dict[int, Sequence[bytes]]:
        """The records of each node, given those of this one, in node order."""
        if self.topology.rank != 0:
            if self.topology.is_node_leader:
                self._messenger.send(0, own)
            gathered: dict[int, Sequence[bytes]] = self._messenger.broadcast()
            return gathered
        by_node = {self.topology.node: own}
        for leader in self.topology.node_leaders[1:]:
            by_node[self.topology.node_of_rank[leader]] = received = self._messenger.receive(leader)
            self._bytes += sum(map(len, received))
        self._bytes += (self.topology.node_count - 1) * sum(len(record) for each in by_node.values() for record in each)
        return self._messenger.broadcast(dict(sorted(by_node.items())))

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
        needed, transferred = self.image_cache.needed_bytes, self.image_cache.transferred_bytes
        other, self._bytes = self._bytes, 0
        self.image_cache.needed_bytes = self.image_cache.transferred_bytes = 0
        return {
            "nodes/images_mib": needed / 2**20,
            "nodes/remote_images_mib": transferred / 2**20,
            "nodes/local_fraction": 1 - transferred / needed if needed else 1.0,
            "nodes/other_mib": other / 2**20,
        }

    def finish_collecting(self) -> None:
        """Tell all ranks that rank 0 reads no more records. Collective."""
        self._stop_polling()


RecordSource = Ring | MultiNodeExchange  # what rank 0 reads: the ring of its node, or those of all nodes


def _stripped_record(trajectory: Trajectory) -> bytes:
    return b"".join(encode_trajectory(strip_images(trajectory)))


def make_exchange(ring: Ring, topology: NodeTopology, config: Config) -> RecordExchange:
    """The exchange of a job, given this node's ring. The process groups must exist. Collective."""
    if config.cluster.nodes == 1:
        return RecordExchange(ring)
    messenger = RankMessenger(topology, MESSAGE_TIMEOUT_SECONDS, collective_timeout_seconds(config))
    image_cache = ImageCache(messenger, ImageShard(parallel_state.get_data_parallel_rank(), image_rank()))
    damaged = config.run_folder / DAMAGED_FOLDER / f"node-{topology.node}"
    return MultiNodeExchange(ring, messenger, image_cache, damaged)
