"""Per-batch image cache: screenshots of this node by reference, screenshots of other nodes fetched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_webrl.trainer.exchange.node_assignment import NodeSet, ReplicaNodes
from megatron_webrl.trainer.exchange.rank_messages import RankMessageError, RankMessenger
from megatron_webrl.trainer.images.image_keys import image_key, image_size
from megatron_webrl.trainer.parallel import all_gather_object

WantedImages = Mapping[int, Sequence[bytes]]  # rank -> image keys


@dataclass(frozen=True)
class ImageTransferStats:
    """Bytes of screenshots, over all ranks."""

    needed_bytes: int = 0
    transferred_bytes: int = 0  # part of needed_bytes: from another node

    def __add__(self, other: ImageTransferStats) -> ImageTransferStats:
        return ImageTransferStats(
            self.needed_bytes + other.needed_bytes, self.transferred_bytes + other.transferred_bytes
        )


@dataclass(frozen=True)
class ImageShard:
    """The replica whose images a rank encodes, and its shard of them."""

    data_parallel_rank: int
    image_rank: int | None  # this rank among the replica's encoding ranks; None: it encodes no images


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
        self.transfer_stats = ImageTransferStats()  # accumulated; the reader of the metrics resets it

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

    def fetch(self, wanted: WantedImages) -> ImageTransferStats:
        """Transfer missing images. Collective, with equal arguments on all ranks. Raises RankMessageError."""
        needed = transferred = 0
        transfers: dict[tuple[int, int], list[bytes]] = defaultdict(list)  # sender, receiver -> keys
        for rank, keys in sorted(wanted.items()):
            for key in dict.fromkeys(keys):
                nodes, size = self._nodes_of_image[key], image_size(key)
                needed += size
                if self._topology.node_of_rank[rank] not in nodes:
                    transfers[self._topology.node_leader(min(nodes)), rank].append(key)
                    transferred += size
        rank = self._topology.rank
        outgoing = {to: [self.get(key) for key in keys] for (sender, to), keys in transfers.items() if sender == rank}
        expected = {sender: keys for (sender, to), keys in transfers.items() if to == rank}
        sizes = {sender: sum(map(image_size, keys)) for sender, keys in expected.items()}
        for sender, received in self._messenger.exchange_blobs(outgoing, sizes).items():
            self._add_received(sender, expected[sender], received)
        return ImageTransferStats(needed, transferred)

    def get(self, key: bytes) -> bytes:
        """An image of this node, or one that was fetched."""
        return self._images[key]

    def _add_received(self, sender: int, keys: Sequence[bytes], received: memoryview) -> None:
        offset = 0
        for key in keys:
            image = received[offset : offset + image_size(key)]
            offset += len(image)
            if image_key(image) != key:
                raise RankMessageError(
                    f"{self._topology.rank_name(sender)} sent {len(image)} bytes that are not the requested screenshot"
                )
            self._images[key] = bytes(image)  # a copy is hashable, a view of the received buffer is not
