"""Screenshots of several nodes: their keys, the nodes that have them, and which replicas compute with them.

Equal screenshots have equal keys. A stripped trajectory, with keys in place of its screenshots, is a valid trajectory
and a valid record: counting, selection and planning need no screenshots, so ranks on other nodes get it. Only a rank
that makes pixels looks up the keys.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_webrl.ring.record import Buffer
from megatron_webrl.trainer.data.prefix_merging import MergedSequence
from megatron_webrl.trainer.multi_node.rank_messages import RankMessageError, RankMessenger
from megatron_webrl.trainer.parallel import all_gather_object
from megatron_webrl.types import Trajectory

_KEY = struct.Struct("<Q16s")  # bytes of the screenshot, BLAKE2b of them
IMAGE_KEY_BYTES = _KEY.size
BALANCE_TOLERANCE = 0.02  # by which a node set's load per replica may exceed the mean, to keep images where they are
NodeSet = frozenset[int]  # nodes of the ranks that encode a replica's images
WantedImages = Mapping[int, Sequence[bytes]]  # rank -> image keys


def image_key(image: Buffer) -> bytes:
    """The key of an encoded screenshot."""
    return _KEY.pack(len(image), hashlib.blake2b(image, digest_size=16).digest())


def image_size(key: bytes) -> int:
    """Bytes of the screenshot with this key."""
    return int(_KEY.unpack(key)[0])


def strip_images(trajectory: Trajectory) -> Trajectory:
    """The trajectory with keys in place of its screenshots."""
    return replace(trajectory, images=tuple(map(image_key, trajectory.images)))


@dataclass(frozen=True)
class ImageShard:
    """The replica whose images a rank encodes, and its shard of them."""

    data_parallel_rank: int
    image_rank: int | None  # this rank among the replica's encoding ranks; None: it encodes no images


@dataclass(frozen=True)
class ReplicaNodes:
    """The nodes of each data-parallel replica, and the images on them."""

    by_replica: tuple[NodeSet, ...]
    has_image: Callable[[bytes, NodeSet], bool]  # image key, nodes -> whether one of the nodes has the image

    @property
    def unique_node_sets(self) -> tuple[NodeSet, ...]:
        """Each node set once."""
        return tuple(dict.fromkeys(self.by_replica))

    def replicas_on(self, node_set: NodeSet) -> list[int]:
        """The replicas on a node set."""
        return [replica for replica, nodes in enumerate(self.by_replica) if nodes == node_set]


class ImageCache:
    """Life cycle per batch: `clear`, `register` all trajectories, `fetch` the images that ranks need, `get`.

    Holds views of its node's ring, valid until the batch is closed, and copies of fetched images. Every rank knows
    where all images are and who needs them, so there are no requests. No image is sent to a rank whose node has it.
    """

    def __init__(self, messenger: RankMessenger, shard: ImageShard) -> None:
        """Collective."""
        self._messenger, self._topology = messenger, messenger.topology
        self.shards = tuple(all_gather_object(shard))
        replicas = range(1 + max(each.data_parallel_rank for each in self.shards))
        self._nodes_of_replica = tuple(
            frozenset(self._topology.node_of_rank[rank] for rank in self.image_ranks_of(replica).values())
            for replica in replicas
        )
        self._nodes_of_image: dict[bytes, set[int]] = {}
        self._images: dict[bytes, bytes] = {}  # key -> image; local ones are views
        self.needed_bytes = self.transferred_bytes = 0  # over all ranks, until the metrics are read

    def image_ranks_of(self, replica: int) -> dict[int, int]:
        """Image rank -> rank, for the ranks that encode a replica's images."""
        return {
            s.image_rank: rank
            for rank, s in enumerate(self.shards)
            if s.data_parallel_rank == replica and s.image_rank is not None
        }

    @property
    def replica_nodes(self) -> ReplicaNodes:
        """The nodes of each replica, for planning a batch."""
        return ReplicaNodes(self._nodes_of_replica, self.has_image)

    def clear(self) -> None:
        """Forget all images."""
        self._nodes_of_image, self._images = {}, {}

    def register(self, node: int, keys: Iterable[bytes], images: Iterable[bytes] = ()) -> None:
        """Record that `node` has the images of `keys`; on ranks of that node `images` holds them, in key order."""
        keys = list(keys)
        for key in keys:
            self._nodes_of_image.setdefault(key, set()).add(node)
        if node == self._topology.node:
            self._images.update(zip(keys, images, strict=True))

    def has_image(self, key: bytes, nodes: NodeSet) -> bool:
        """Whether one of the nodes has an image."""
        return not self._nodes_of_image[key].isdisjoint(nodes)

    def fetch(self, wanted: WantedImages) -> None:
        """Transfer missing images. Collective, with equal arguments on all ranks. Raises RankMessageError."""
        transfers: dict[tuple[int, int], list[bytes]] = defaultdict(list)  # sender, receiver -> keys
        for rank, keys in sorted(wanted.items()):
            for key in dict.fromkeys(keys):
                nodes, size = self._nodes_of_image[key], image_size(key)
                self.needed_bytes += size
                if self._topology.node_of_rank[rank] not in nodes:
                    transfers[self._topology.node_leader(min(nodes)), rank].append(key)
                    self.transferred_bytes += size
        rank = self._topology.rank
        outgoing = {to: [self.get(key) for key in keys] for (sender, to), keys in transfers.items() if sender == rank}
        expected = {sender: keys for (sender, to), keys in transfers.items() if to == rank}
        sizes = {sender: sum(map(image_size, keys)) for sender, keys in expected.items()}
        for sender, received in self._messenger.exchange_blobs(outgoing, sizes).items():
            offset = 0
            for key in expected[sender]:
                image = received[offset : offset + image_size(key)]
                offset += len(image)
                if image_key(image) != key:
                    name = self._topology.rank_name(sender)
                    raise RankMessageError(f"{name} sent {len(image)} bytes that are not the requested screenshot")
                self._images[key] = bytes(image)  # a copy is hashable, a view of the received buffer is not

    def get(self, key: bytes) -> bytes:
        """An image of this node, or one that was fetched."""
        return self._images[key]


def assign_to_nodes(
    sequences: Sequence[MergedSequence], costs: Sequence[float], nodes: ReplicaNodes
) -> list[list[int]]:
    """Ascending indices of the sequences that each unique node set computes. A pure function of its arguments.

    In their order, each goes to the node set that misses the fewest bytes of its images, if that leaves the load per
    replica within BALANCE_TOLERANCE of the mean, else to the one whose load is lowest with it.
    """
    node_sets = nodes.unique_node_sets
    replicas = [len(nodes.replicas_on(node_set)) for node_set in node_sets]
    limit = (1 + BALANCE_TOLERANCE) * sum(costs) / len(nodes.by_replica)
    loads = [0.0 for _ in node_sets]  # per replica
    assigned: list[list[int]] = [[] for _ in node_sets]
    for index, (sequence, cost) in enumerate(zip(sequences, costs, strict=True)):
        keys = set(map(bytes, sequence.images))
        missing = [sum(image_size(key) for key in keys if not nodes.has_image(key, each)) for each in node_sets]
        after = [load + cost / count for load, count in zip(loads, replicas, strict=True)]
        within = [i for i, load in enumerate(after) if load <= limit]
        target = min(within or range(len(after)), key=lambda i: (missing[i] if within else 0, after[i]))
        loads[target] = after[target]
        assigned[target].append(index)
    return assigned
