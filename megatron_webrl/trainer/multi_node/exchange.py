"""Distributes the groups of an update to all trainer ranks, on one node or several.

Rank 0 assembles groups from the ring of its node, and from the records, stripped of their screenshots, that the leaders
of other nodes send it. It broadcasts which records an update has, stripped if there are several nodes; the ranks of a
node read its own in its ring. Screenshots stay where they are, in the image cache, until the plan of the update says
which rank makes their pixels. docs/model.md draws the path of an episode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import FOLDER as DAMAGED_FOLDER
from megatron_webrl.ring.record import Buffer, decode_trajectory, encode_trajectory, read_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, RankMessenger
from megatron_webrl.trainer.multi_node.screenshots import ImageCache, ImageShard, strip_images
from megatron_webrl.trainer.parallel import collective_timeout_seconds, image_rank
from megatron_webrl.types import Group, Trajectory

MESSAGE_TIMEOUT_SECONDS = 120.0  # limit of one message between trainer ranks
SelectedGroups = list[tuple[Group, list[int]]]  # the groups of an update with the numbers of their records


class CollectInterrupt(Enum):
    """Why rank 0 returns no groups yet."""

    STOP = "an early end was requested"
    NEW_ENGINES = "an engine waits for weights"


class RecordExchange:
    """Life cycle: per update `broadcast_groups` on every rank, then any other method; `finish_collecting` and `close`.

    While rank 0 polls for groups (GroupSource calls `committed`), it reads the ring of its node, and the leaders of
    other nodes serve it inside `broadcast_groups` or `finish_collecting`: in each poll rank 0 sends each leader the
    records to free and receives new ones. A record's number contains its node: sequence * node_count + node. It stays
    in its ring until rank 0 acknowledges it: after a restart of the trainer, its leader finds it and sends it again.
    """

    def __init__(self, ring: Ring, messenger: RankMessenger, image_cache: ImageCache, damaged_folder: Path) -> None:
        """`damaged_folder` receives the damaged records of this node's ring, if it is not that of rank 0."""
        self._ring, self.topology = ring, messenger.topology
        self._messenger, self.image_cache, self._damaged_folder = messenger, image_cache, damaged_folder
        self._sent: set[int] = set()  # on another leader: sequences sent to rank 0 and not freed
        self._records: dict[int, bytes] = {}  # on rank 0: stripped records of other nodes by number
        self._to_free: dict[int, list[int]] = defaultdict(list)  # on rank 0: node -> sequences to free at the next poll
        # (ticket, index) -> screenshots, of the update's fresh episodes of this node.
        self._images: dict[tuple[int, int], tuple[bytes, ...]] = {}
        self._bytes = 0  # bytes of records and messages that this rank sent or received since the last update

    # -- on rank 0, while it polls for groups -----------------------------------------------------

    def committed(self, seen: Collection[int]) -> list[int]:
        """Poll all leaders; numbers of the records that are not in `seen`."""
        others = self.topology.node_leaders[1:]
        for leader in others:
            self._send_request(leader, "poll")
        count, own = self.topology.node_count, self.topology.node
        local = self._ring.committed({number // count for number in seen if number % count == own})
        for leader in others:
            records = self._messenger.receive(leader)
            self._bytes += sum(map(len, records.values()))
            node = self.topology.node_of_rank[leader]
            self._records |= {sequence * count + node: record for sequence, record in records.items()}
        remote = (number for number in self._records if number not in seen)
        return sorted([*(sequence * count + own for sequence in local), *remote])

    def read(self, sequence: int, verify: bool = True) -> Buffer:
        """A record of rank 0's node, or a stripped one of another."""
        place, node = divmod(sequence, self.topology.node_count)
        return self._ring.read(place, verify) if node == self.topology.node else self._records[sequence]

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Free records: those of other nodes at the next poll."""
        local = []
        for number in sequences:
            sequence, node = divmod(number, self.topology.node_count)
            if node == self.topology.node:
                local.append(sequence)
            elif self._records.pop(number, None) is not None:
                self._to_free[node].append(sequence)
        self._ring.acknowledge(local)

    def _send_request(self, leader: int, request: str) -> None:
        sequences = self._to_free.pop(self.topology.node_of_rank[leader], [])
        self._bytes += self._messenger.send(leader, (request, sequences))

    # -- on a leader ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer the polls of rank 0 until it stops polling."""
        limit = self._messenger.collective_timeout_seconds  # between two polls rank 0 may wait for a service or a disk
        while True:
            request, freed = self._messenger.receive(0, limit)
            if freed:
                self._ring.acknowledge(freed)
                self._sent.difference_update(freed)
            if request == "stop":
                return
            self._messenger.send(0, self._new_records())

    def _new_records(self) -> dict[int, bytes]:
        """Stripped records of this node's ring that were not sent yet, by sequence; a damaged one is empty."""
        fresh = self._ring.committed(self._sent)
        self._sent.update(fresh)
        read = {sequence: read_trajectory(self._ring, sequence, self._damaged_folder) for sequence in fresh}
        return {number: _stripped_record(each) if each else b"" for number, each in read.items()}

    # -- on every rank ----------------------------------------------------------------------------

    def broadcast_groups(self, selected: SelectedGroups | CollectInterrupt | None) -> list[Group] | CollectInterrupt:
        """Rank 0's selection, on every rank; other ranks pass None. Collective. Raises RankMessageError."""
        self._stop_polling()
        message: Any = selected
        if isinstance(selected, list):
            message = [
                (group.ticket, dict(zip(numbers, map(self._shared_record, numbers, group.trajectories), strict=True)))
                for group, numbers in selected
            ]
            sizes = (len(record) for _, records in message for record in records.values())
            self._bytes += (self.topology.node_count - 1) * sum(sizes)
        message = self._messenger.broadcast(message)
        if isinstance(message, CollectInterrupt):
            return message
        self.image_cache.clear()
        self._images = {}
        return [
            Group(ticket, tuple(self._decode(number, record) for number, record in records.items()))
            for ticket, records in message
        ]

    def _shared_record(self, number: int, trajectory: Trajectory) -> bytes:
        """What ranks of other nodes need of a record; empty if there are none."""
        if self.topology.node_count == 1:
            return b""
        return self._records.get(number) or _stripped_record(trajectory)

    def _decode(self, number: int, record: bytes) -> Trajectory:
        """A stripped trajectory of an update, whose images it registers in the cache; read from this node's ring."""
        sequence, node = divmod(number, self.topology.node_count)
        if node != self.topology.node:
            trajectory = decode_trajectory(record)
            self.image_cache.register(node, trajectory.images)
            return trajectory
        whole = decode_trajectory(self._ring.read(sequence, verify=False))
        trajectory = strip_images(whole)
        self.image_cache.register(node, trajectory.images, whole.images)
        self._images[whole.ticket, whole.index] = whole.images
        return trajectory

    def _stop_polling(self) -> None:
        """End the polls: leaders serve until rank 0 arrives here."""
        if self.topology.rank == 0:
            for leader in self.topology.node_leaders[1:]:
                self._send_request(leader, "stop")
        elif self.topology.is_node_leader:
            self._serve()

    def all_gather_trajectories(self, local: Sequence[Trajectory]) -> list[Trajectory]:
        """Stripped trajectories of all nodes, in node order; registers their images. Raises RankMessageError."""
        keys = [key for each in local for key in strip_images(each).images]
        self.image_cache.register(self.topology.node, keys, [image for each in local for image in each.images])
        trajectories = []
        for node, records in self.all_gather_records([_stripped_record(each) for each in local]).items():
            for trajectory in map(decode_trajectory, records):
                trajectories.append(trajectory)
                if node != self.topology.node:
                    self.image_cache.register(node, trajectory.images)
        return trajectories

    def all_gather_records(self, own: Sequence[bytes]) -> dict[int, Sequence[bytes]]:
        """The records of each node, given those of this one, in node order. Collective. Raises RankMessageError."""
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
        """The trajectories of an update, with images, that came from this node's ring: its leader stores them."""
        return [
            replace(trajectory, images=self._images[group.ticket, trajectory.index])
            for group in groups
            for trajectory in group.trajectories
            if (group.ticket, trajectory.index) in self._images
        ]

    def pop_metrics(self) -> dict[str, float]:
        """Traffic since the last call, MiB, and the fraction of screenshots that were local: see docs/model.md."""
        if self.topology.node_count == 1:
            return {}
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

    def close(self) -> None:
        """Detach from the ring."""
        self._ring.close()


RecordSource = Ring | RecordExchange  # what GroupSource reads


def _stripped_record(trajectory: Trajectory) -> bytes:
    return b"".join(encode_trajectory(strip_images(trajectory)))


def make_exchange(ring: Ring, topology: NodeTopology, config: Config) -> RecordExchange:
    """The exchange of a job, given this node's ring. The process groups must exist. Collective."""
    messenger = RankMessenger(topology, MESSAGE_TIMEOUT_SECONDS, collective_timeout_seconds(config))
    image_cache = ImageCache(messenger, ImageShard(parallel_state.get_data_parallel_rank(), image_rank()))
    damaged = config.run_folder / DAMAGED_FOLDER / f"node-{topology.node}"
    return RecordExchange(ring, messenger, image_cache, damaged)
