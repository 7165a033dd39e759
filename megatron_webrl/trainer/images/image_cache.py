"""Screenshots of a batch by name: those on this node by reference, others brought from the node that has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_webrl.trainer.exchange.node_assignment import NodeSet, ReplicaNodes
from megatron_webrl.trainer.exchange.rank_messages import RankMessageError, RankMessenger
from megatron_webrl.trainer.images.image_keys import image_key, image_size

WantedImages = Mapping[int, Sequence[bytes]]  # rank -> names


@dataclass(frozen=True)
class ImageTransferStats:
    """Bytes of screenshots, over all ranks."""

    needed_bytes: int = 0
    transferred_bytes: int = 0  # of those: from another node

    def __add__(self, other: ImageTransferStats) -> ImageTransferStats:
        return ImageTransferStats(
            self.needed_bytes + other.needed_bytes, self.transferred_bytes + other.transferred_bytes
        )


@dataclass(frozen=True)
class ImageShard:
    """Which screenshots a rank turns into pixels: of whose rows, and which share of them."""

    data_parallel_rank: int
    image_rank: int | None  # its place among the ranks of the replica that encode; None: it encodes none


class ImageCache:
    """Life: per batch `clear`, `place` for all its episodes, `bring` what ranks need, `find`.

    What a rank holds are views of its node's ring, valid until the batch is closed, and copies of what was brought.
    Every rank knows where every screenshot is and what every rank needs, so that nothing is asked for: each sends and
    takes what follows from that. A screenshot that is on a rank's node is never sent to it.
    """

    def __init__(self, wire: RankMessenger, seat: ImageShard) -> None:
        """Collective."""
        self._wire, self._nodes = wire, wire.topology
        seats: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(seats, seat)
        self.shards: tuple[ImageShard, ...] = tuple(seats)
        replicas = range(1 + max(each.data_parallel_rank for each in self.shards))
        self._sites = tuple(
            frozenset(self._nodes.node_of_rank[rank] for rank in self.image_ranks_of(replica).values())
            for replica in replicas
        )
        self._homes: dict[bytes, set[int]] = {}
        self._held: dict[bytes, bytes] = {}  # or views that serve as such
        self.transfer_stats = ImageTransferStats()  # of what rows were built of, since somebody last took it away

    def image_ranks_of(self, replica: int) -> dict[int, int]:
        """Share -> rank, of the ranks that encode a replica's screenshots."""
        return {
            s.image_rank: rank
            for rank, s in enumerate(self.shards)
            if s.data_parallel_rank == replica and s.image_rank is not None
        }

    @property
    def replica_nodes(self) -> ReplicaNodes:
        """Where replicas are, for the plan of a batch."""
        return ReplicaNodes(self._sites, self.has_image)

    def clear(self) -> None:
        """Forget all screenshots."""
        self._homes, self._held = {}, {}

    def register(self, node: int, names: Iterable[bytes], images: Iterable[bytes] = ()) -> None:
        """Screenshots are on a node: on ranks of that node `images` are they, in the order of the names."""
        held = node == self._nodes.node
        names = list(names)
        for name in names:
            self._homes.setdefault(name, set()).add(node)
        if held:
            self._held.update(zip(names, images, strict=True))

    def has_image(self, name: bytes, site: NodeSet) -> bool:
        """Whether a screenshot is on one of the nodes."""
        return not self._homes[name].isdisjoint(site)

    def fetch(self, wanted: WantedImages) -> ImageTransferStats:
        """Have each rank hold what it wants. Collective, with the same argument everywhere. Raises WireError."""
        needed = moved = 0
        moves: dict[tuple[int, int], list[bytes]] = defaultdict(list)  # sender, receiver -> names
        for rank, names in sorted(wanted.items()):
            for name in dict.fromkeys(names):
                homes, size = self._homes[name], image_size(name)
                needed += size
                if self._nodes.node_of_rank[rank] not in homes:
                    moves[self._nodes.node_leader(min(homes)), rank].append(name)
                    moved += size
        me = self._nodes.rank
        outgoing = {to: [self.get(name) for name in names] for (sender, to), names in moves.items() if sender == me}
        expected = {sender: names for (sender, to), names in moves.items() if to == me}
        sizes = {sender: sum(map(image_size, names)) for sender, names in expected.items()}
        for sender, received in self._wire.exchange_blobs(outgoing, sizes).items():
            self._keep(sender, expected[sender], received)
        return ImageTransferStats(needed, moved)

    def get(self, name: bytes) -> bytes:
        """A screenshot that is on this node or was brought here."""
        return self._held[name]

    def _keep(self, sender: int, names: Sequence[bytes], received: memoryview) -> None:
        place = 0
        for name in names:
            image = received[place : place + image_size(name)]
            place += len(image)
            if image_key(image) != name:
                raise RankMessageError(
                    f"{self._nodes.rank_name(sender)} sent a screenshot of {len(image)} bytes that is not the one wanted"
                )
            self._held[name] = bytes(image)  # can be a key, which a view of what came cannot
