"""Distributes the groups of an update to all trainer ranks on one node; multi_node_exchange: on several."""

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
SelectedGroups = Sequence[tuple[Group, list[int]]]  # the groups of an update with the numbers of their records


class CollectInterrupt(Enum):
    """Why rank 0 returns no groups yet."""

    STOP = "an early end was requested"
    NEW_ENGINES = "an engine waits for weights"


class RecordSource(Protocol):
    """The records that rank 0 reads: of its node's ring, or of all nodes' rings."""

    def committed(self, seen: Container[int]) -> list[int]:
        """Numbers of committed records that are not in `seen`, oldest first."""
        ...

    def read(self, sequence: int, verify: bool = True) -> Buffer:
        """One record."""
        ...

    def acknowledge(self, sequences: Iterable[int]) -> None:
        """Free records."""
        ...


class RecordExchange:
    """Exchange among ranks on one node: every rank reads the same ring and files."""

    topology = NodeTopology((0,), 0)  # identifies the files that this rank reads and writes: those of node 0

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
