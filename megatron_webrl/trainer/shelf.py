"""Screenshots of a batch by name: those on this node by reference, others brought from the node that has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_webrl.trainer.locality import Site, Sites
from megatron_webrl.trainer.outline import name_of, size_of
from megatron_webrl.trainer.wire import Wire, WireError

Wanted = Mapping[int, Sequence[bytes]]  # rank -> names


@dataclass(frozen=True)
class Brought:
    """Bytes of screenshots, over all ranks."""

    needed: int = 0
    moved: int = 0  # of those: from another node

    def __add__(self, other: Brought) -> Brought:
        return Brought(self.needed + other.needed, self.moved + other.moved)


@dataclass(frozen=True)
class Seat:
    """Which screenshots a rank turns into pixels: of whose rows, and which share of them."""

    replica: int
    share: int | None  # its place among the ranks of the replica that encode; None: it encodes none


class Shelf:
    """Life: per batch `clear`, `place` for all its episodes, `bring` what ranks need, `find`.

    What a rank holds are views of its node's ring, valid until the batch is closed, and copies of what was brought.
    Every rank knows where every screenshot is and what every rank needs, so that nothing is asked for: each sends and
    takes what follows from that. A screenshot that is on a rank's node is never sent to it.
    """

    def __init__(self, wire: Wire, seat: Seat) -> None:
        """Collective."""
        self._wire, self._nodes = wire, wire.nodes
        seats: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(seats, seat)
        self.seats: tuple[Seat, ...] = tuple(seats)
        replicas = range(1 + max(each.replica for each in self.seats))
        self._sites = tuple(
            frozenset(self._nodes.of[rank] for rank in self.ranks_of(replica).values()) for replica in replicas
        )
        self._homes: dict[bytes, set[int]] = {}
        self._held: dict[bytes, bytes] = {}  # or views that serve as such
        self.trained = Brought()  # of what rows were built of, since somebody last took it away

    def ranks_of(self, replica: int) -> dict[int, int]:
        """Share -> rank, of the ranks that encode a replica's screenshots."""
        return {s.share: rank for rank, s in enumerate(self.seats) if s.replica == replica and s.share is not None}

    @property
    def sites(self) -> Sites:
        """Where replicas are, for the plan of a batch."""
        return Sites(self._sites, self.has)

    def clear(self) -> None:
        """Forget all screenshots."""
        self._homes, self._held = {}, {}

    def place(self, node: int, names: Iterable[bytes], images: Iterable[bytes] = ()) -> None:
        """Screenshots are on a node: on ranks of that node `images` are they, in the order of the names."""
        held = node == self._nodes.node
        names = list(names)
        for name in names:
            self._homes.setdefault(name, set()).add(node)
        if held:
            self._held.update(zip(names, images, strict=True))

    def has(self, name: bytes, site: Site) -> bool:
        """Whether a screenshot is on one of the nodes."""
        return not self._homes[name].isdisjoint(site)

    def bring(self, wanted: Wanted) -> Brought:
        """Have each rank hold what it wants. Collective, with the same argument everywhere. Raises WireError."""
        needed = moved = 0
        moves: dict[tuple[int, int], list[bytes]] = defaultdict(list)  # sender, receiver -> names
        for rank, names in sorted(wanted.items()):
            for name in dict.fromkeys(names):
                homes, size = self._homes[name], size_of(name)
                needed += size
                if self._nodes.of[rank] not in homes:
                    moves[self._nodes.reader(min(homes)), rank].append(name)
                    moved += size
        me = self._nodes.rank
        outgoing = {to: [self.find(name) for name in names] for (sender, to), names in moves.items() if sender == me}
        expected = {sender: names for (sender, to), names in moves.items() if to == me}
        sizes = {sender: sum(map(size_of, names)) for sender, names in expected.items()}
        for sender, received in self._wire.exchange(outgoing, sizes).items():
            self._keep(sender, expected[sender], received)
        return Brought(needed, moved)

    def find(self, name: bytes) -> bytes:
        """A screenshot that is on this node or was brought here."""
        return self._held[name]

    def _keep(self, sender: int, names: Sequence[bytes], received: memoryview) -> None:
        place = 0
        for name in names:
            image = received[place : place + size_of(name)]
            place += len(image)
            if name_of(image) != name:
                raise WireError(
                    f"{self._nodes.name(sender)} sent a screenshot of {len(image)} bytes that is not the one wanted"
                )
            self._held[name] = bytes(image)  # can be a key, which a view of what came cannot
