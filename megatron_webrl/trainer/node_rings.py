"""The rings of several nodes as one source of groups. docs/packing.md draws the way of an episode.

A reader on each node looks at its ring and tells the first rank of every record in outline (outline.py). The first
rank assembles groups of outlines, chooses, and has the outlines of the update told to all ranks. Screenshots stay where
they are, on a shelf, until the plan of the update says who makes pixels of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

from megatron_webrl.config import Config
from megatron_webrl.ring.record import decode, encode
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.nodes import Nodes
from megatron_webrl.trainer.outline import outline, restored
from megatron_webrl.trainer.parallel import collective_seconds
from megatron_webrl.trainer.rows import RowBuilder
from megatron_webrl.trainer.sharing import Chosen, Interruption, OneRing, Records, Together
from megatron_webrl.trainer.shelf import Brought, Seat, Shelf
from megatron_webrl.trainer.wire import Message, Wire
from megatron_webrl.types import Group, Trajectory

Value = TypeVar("Value")


def join_rings(ring: Ring, nodes: Nodes, config: Config, builder: RowBuilder) -> OneRing | NodeRings:
    """The rings of a job, of which `ring` is this node's. Collective. A builder on several nodes needs their shelf."""
    if config.cluster.nodes == 1:
        return OneRing(ring)
    wire = Wire(nodes, config.ring.exchange_seconds, collective_seconds(config))
    shelf = Shelf(wire, Seat(builder.replica, builder.image_rank if builder.pixels else None))
    return NodeRings(ring, wire, shelf)


class NodeRings(Together):
    """Life: per update `share` on every rank; then whatever needs the episodes; `end`, `close` at the end.

    While the first rank looks for groups (`committed`, by GroupSource), the readers serve it within `share` or `end`:
    per turn it tells each which records are done with, and hears of those that have come. The number of a record says
    its node: sequence * nodes + node.

    A record stays in its ring until the first rank acknowledges it, whatever becomes of any rank: a restarted reader
    finds it again, and tells of it again.
    """

    def __init__(self, ring: Ring, wire: Wire, shelf: Shelf) -> None:
        self._ring, self._wire, self.shelf = ring, wire, shelf
        self.nodes: Nodes = wire.nodes
        self._told: set[int] = set()  # at a reader: sequences told of and not acknowledged
        self._outlines: dict[int, bytes | memoryview] = {}  # at the first rank: of all records told of, by number
        self._done: dict[int, list[int]] = defaultdict(list)  # there: node -> sequences, to be told in the next turn
        self._home: dict[tuple[int, int], int] = {}  # (ticket, index) -> node, of the update's fresh episodes
        self._bytes = 0  # of outlines and orders, that this rank sent since the last update

    # -- at the first rank, while it looks for groups ---------------------------------------------

    @property
    def records(self) -> Records:
        """For the first rank."""
        return self

    def committed(self, seen: Container[int]) -> list[int]:
        """One turn with all readers."""
        others = [rank for rank in self.nodes.readers if rank != self.nodes.rank]
        for reader in others:
            self._order(reader, "look")
        self._apply(self._done.pop(self.nodes.node, []))
        self._learn(self.nodes.node, *self._arrivals())
        for reader in others:
            message = self._wire.receive(reader)
            self._bytes += sum(map(len, message.blobs))
            self._learn(self.nodes.of[reader], message.content, message.blobs)
        return sorted(number for number in self._outlines if number not in seen)

    def read(self, sequence: int, verify: bool = True) -> bytes | memoryview:
        """The outline of a record: a record itself."""
        return self._outlines[sequence]

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Free records at the next turn."""
        for number in sequences:
            if self._outlines.pop(number, None) is not None:
                self._done[number % self.nodes.count].append(number // self.nodes.count)

    def _learn(self, node: int, sequences: Sequence[int], outlines: Sequence[bytes | memoryview]) -> None:
        for sequence, record in zip(sequences, outlines, strict=True):
            self._outlines[sequence * self.nodes.count + node] = record

    def _order(self, reader: int, what: str) -> None:
        done = self._done.pop(self.nodes.of[reader], [])
        self._bytes += self._wire.send(reader, {"order": what, "done": done})

    # -- at a reader ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Do what the first rank orders, until it has found what it looked for."""
        limit = self._wire.patience  # the first rank may have other work before it begins to look
        while True:
            order: dict[str, Any] = self._wire.receive(0, limit).content
            limit = self._wire.seconds
            self._apply(order["done"])
            if order["order"] == "leave":
                return
            sequences, outlines = self._arrivals()
            self._wire.send(0, sequences, outlines)

    def _arrivals(self) -> tuple[list[int], list[bytes]]:
        """Records of this node's ring that have not been told of: sequences and outlines."""
        sequences = self._ring.committed(self._told)
        self._told.update(sequences)
        return sequences, [b"".join(encode(outline(decode(self._ring.read(s))))) for s in sequences]

    def _apply(self, done: Sequence[int]) -> None:
        if done:
            self._ring.acknowledge(done)
            self._told.difference_update(done)

    # -- on every rank ----------------------------------------------------------------------------

    def share(self, chosen: Chosen | Interruption | None) -> list[Group] | Interruption:
        """What the first rank has chosen, on every rank; the others give None. Collective. Raises WireError."""
        self._leave()
        if chosen is None:
            message = self._wire.spread()
        elif isinstance(chosen, Interruption):
            message = self._wire.spread({"interruption": chosen.name})
        else:
            tickets = [[group.ticket, numbers] for group, numbers in chosen]
            blobs = [self._outlines[number] for _, numbers in chosen for number in numbers]
            self._bytes += (self.nodes.count - 1) * sum(map(len, blobs))
            message = self._wire.spread({"tickets": tickets}, blobs)
        if "interruption" in message.content:
            return Interruption[message.content["interruption"]]
        return self._take_over(message)

    def _take_over(self, message: Message) -> list[Group]:
        """The groups of an update, their screenshots on the shelf."""
        self.shelf.clear()
        self._home = {}
        outlines = iter(message.blobs)
        groups = []
        for ticket, numbers in message.content["tickets"]:
            trajectories = []
            for number in numbers:
                sequence, node = divmod(number, self.nodes.count)
                trajectory = decode(next(outlines))
                here = node == self.nodes.node
                images = decode(self._ring.read(sequence, verify=False)).images if here else ()
                self.shelf.place(node, trajectory.images, images)
                self._home[ticket, trajectory.index] = node
                trajectories.append(trajectory)
            groups.append(Group(ticket, tuple(trajectories)))
        return groups

    def _leave(self) -> None:
        """End the turns: readers have served until the first rank comes here."""
        if self.nodes.rank == 0:
            for reader in self.nodes.readers[1:]:
                self._order(reader, "leave")
            self._apply(self._done.pop(self.nodes.node, []))
        elif self.nodes.reads:
            self._serve()

    @property
    def stores(self) -> bool:
        """A reader stores what came from its node's ring."""
        return self.nodes.reads

    def agree(self, value: Value) -> Value:
        """What the reader of the node says; JSON."""
        return self._wire.share_node(value)

    def offer(self, mine: Sequence[Trajectory]) -> list[Trajectory]:
        """The episodes of all nodes in outline, node by node; their screenshots go to the shelf. Raises WireError."""
        outlines = [outline(trajectory) for trajectory in mine]
        names = [name for each in outlines for name in each.images]
        self.shelf.place(self.nodes.node, names, [image for each in mine for image in each.images])
        records = [b"".join(encode(each)) for each in outlines] if self.nodes.reads else []
        if self.nodes.rank == 0:
            found: dict[int, Sequence[bytes | memoryview]] = {self.nodes.node: records}
            for reader in self.nodes.readers[1:]:
                found[self.nodes.of[reader]] = self._wire.receive(reader).blobs
                self._bytes += sum(map(len, found[self.nodes.of[reader]]))
            nodes = sorted(found)
            blobs = [blob for node in nodes for blob in found[node]]
            self._bytes += (self.nodes.count - 1) * sum(map(len, blobs))
            message = self._wire.spread([[node, len(found[node])] for node in nodes], blobs)
        else:
            if self.nodes.reads:
                self._wire.send(0, None, records)
            message = self._wire.spread()
        arrived, everyone = iter(message.blobs), []
        for node, count in message.content:
            for _ in range(count):
                everyone.append(decode(next(arrived)))
                if node != self.nodes.node:
                    self.shelf.place(node, everyone[-1].images)
        return everyone

    def stored_here(self, groups: Iterable[Group]) -> list[Trajectory]:
        """Those that came from this node's ring."""
        return [
            restored(trajectory, self.shelf.find)
            for group in groups
            for trajectory in group.trajectories
            if self._home[group.ticket, trajectory.index] == self.nodes.node
        ]

    def pages(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Screenshots of other nodes are brought to the first rank."""
        names = [bytes(name) for each in trajectories for name in each.images]
        self._bytes += self.shelf.bring({0: names}).moved
        return [restored(each, self.shelf.find) for each in trajectories] if self.nodes.rank == 0 else []

    def take_figures(self) -> dict[str, float]:
        """`nodes/screenshots_mib`: that ranks made pixels of; `nodes/moved_mib`: those that came from another node;
        `nodes/local_share`: the share of the others; `nodes/other_mib`: all else that went between nodes.
        """
        moved, needed = self.shelf.trained.moved, self.shelf.trained.needed
        other, self._bytes, self.shelf.trained = self._bytes, 0, Brought()
        return {
            "nodes/screenshots_mib": needed / 2**20,
            "nodes/moved_mib": moved / 2**20,
            "nodes/local_share": 1 - moved / needed if needed else 1.0,
            "nodes/other_mib": other / 2**20,
        }

    def end(self) -> None:
        """The first rank has looked for the last time. Collective."""
        self._leave()

    def close(self) -> None:
        """Let go of the memory."""
        self._ring.close()
