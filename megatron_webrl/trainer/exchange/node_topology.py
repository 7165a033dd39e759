"""Which trainer ranks are on which node, and which of them reads the node's ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


class NodeTopologyError(RuntimeError):
    """The nodes that the ranks name do not fit the job."""


@dataclass(frozen=True)
class NodeTopology:
    """The nodes of all trainer ranks, as every rank knows them.

    On each node the lowest rank is its reader: it looks at the ring for the others. The first rank, a reader too,
    decides for all.
    """

    node_of_rank: tuple[int, ...]  # node of each rank
    rank: int  # this one

    @classmethod
    def all_gather(cls, node: int, count: int) -> NodeTopology:
        """Tell all ranks that this one is on `node` of `count`. Collective. Raises NodeError on every rank."""
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, node)
        for missing in sorted(set(range(count)) - set(everyone)):
            raise NodeTopologyError(
                f"no trainer rank is on node {missing} of cluster.nodes={count}, so that nobody would read its ring; "
                f"the ranks say that they are on {sorted(set(everyone))}: give each its own --node"
            )
        return cls(tuple(everyone), torch.distributed.get_rank())

    @property
    def node(self) -> int:
        """That of this rank."""
        return self.node_of_rank[self.rank]

    @property
    def node_count(self) -> int:
        """Nodes in all."""
        return 1 + max(self.node_of_rank)

    def node_leader(self, node: int) -> int:
        """The rank that reads the ring of a node."""
        return self.node_of_rank.index(node)

    @property
    def node_leaders(self) -> tuple[int, ...]:
        """All of them, the first rank first."""
        return tuple(self.node_leader(node) for node in dict.fromkeys(self.node_of_rank))

    @property
    def is_node_leader(self) -> bool:
        """Whether this rank is a reader."""
        return self.node_leader(self.node) == self.rank

    def other_ranks_on_node(self, rank: int) -> tuple[int, ...]:
        """The other ranks on the node of a rank."""
        return tuple(
            other for other, node in enumerate(self.node_of_rank) if node == self.node_of_rank[rank] and other != rank
        )

    def rank_name(self, rank: int) -> str:
        """What errors call a rank."""
        return f"trainer-{rank} on node {self.node_of_rank[rank]}"

    def broadcast_tree(self, rank: int) -> tuple[int | None, Sequence[int]]:
        """From whom a rank hears what the first one tells all, and to whom it passes that on.

        Readers form a binary tree, and each tells the ranks of its node.
        """
        if self.node_leader(self.node_of_rank[rank]) != rank:
            return self.node_leader(self.node_of_rank[rank]), ()
        readers = self.node_leaders
        place = readers.index(rank)
        below = readers[2 * place + 1 : 2 * place + 3]
        return readers[(place - 1) // 2] if place else None, (*below, *self.other_ranks_on_node(rank))
