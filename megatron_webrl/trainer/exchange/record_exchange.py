"""How all trainer ranks come by the groups of an update: from the ring of the one node that a job runs on.

On several nodes node_rings.NodeRings takes the place of OneRing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeVar

import torch

from megatron_webrl.ring.record import Buffer, decode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.exchange.node_topology import NodeTopology
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.types import Group, Trajectory

Value = TypeVar("Value")
SelectedGroups = Sequence[tuple[Group, list[int]]]
"""The groups of an update with the numbers of their records."""


class CollectInterrupt(Enum):
    """Why there are no groups yet."""

    STOP = "an early end was asked for"
    NEW_ENGINES = "an engine waits for weights"


class RecordSource(Protocol):
    """Where the first rank finds records: those of its node's ring, or of all nodes' rings."""

    def committed(self, seen: Container[int]) -> list[int]:
        """Numbers of the records that are there and not in `seen`, oldest first."""
        ...

    def read(self, sequence: int, verify: bool = True) -> Buffer:
        """One of them."""
        ...

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Done with them."""
        ...


class RecordExchange:
    """What ranks share that are all on one node: everything, by reference."""

    topology = NodeTopology((0,), 0)  # whose files this rank reads and writes; it speaks for node 0

    @property
    def writes_node_files(self) -> bool:
        """Whether this rank writes files of episodes, those of its node."""
        return torch.distributed.get_rank() == 0

    def broadcast_on_node(self, value: Value) -> Value:
        """What the rank that stores says, on every rank of its node. Collective."""
        return broadcast_object(value)

    def all_gather_trajectories(self, mine: Sequence[Trajectory]) -> list[Trajectory]:
        """Episodes that every rank of a node holds, as those that all ranks train on. Collective."""
        return list(mine)

    def trajectories_to_store(self, groups: Iterable[Group]) -> list[Trajectory]:
        """On a rank that stores: the episodes of an update that are its to store, whole."""
        return [trajectory for group in groups for trajectory in group.trajectories]

    def gather_with_images(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """On the first rank: some episodes of an update, whole. Collective."""
        return list(trajectories)

    def pop_metrics(self) -> dict[str, float]:
        """On the first rank: figures of the last update by their MLflow names."""
        return {}


class SingleNodeExchange(RecordExchange):
    """The ring of the node: the first rank looks at it and tells the others which records to read."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    @property
    def record_source(self) -> RecordSource:
        """For the first rank."""
        return self._ring

    def broadcast_groups(self, chosen: SelectedGroups | CollectInterrupt | None) -> list[Group] | CollectInterrupt:
        """What the first rank has chosen, on every rank; the others give None. Collective."""
        numbers: CollectInterrupt | Mapping[int, list[int]] | None = None
        if chosen is not None:
            numbers = chosen if isinstance(chosen, CollectInterrupt) else {group.ticket: at for group, at in chosen}
        shared = broadcast_object(numbers)
        assert shared is not None
        if isinstance(shared, CollectInterrupt):
            return shared
        if chosen is not None and not isinstance(chosen, CollectInterrupt):
            return [group for group, _ in chosen]
        return [
            Group(ticket, tuple(decode_trajectory(self._ring.read(s, verify=False)) for s in sequences))
            for ticket, sequences in shared.items()
        ]

    def finish_collecting(self) -> None:
        """The first rank has looked at the records for the last time; the others come here at once. Collective."""

    def close(self) -> None:
        """Let go of the memory."""
        self._ring.close()
