"""The nodes of all trainer ranks, and the leader of each node, which reads the node's ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_webrl.trainer.parallel import all_gather_object


class NodeTopologyError(RuntimeError):
    """The nodes of the ranks do not match the job."""


@dataclass(frozen=True)
class NodeTopology:
    """The nodes of all trainer ranks. A node's lowest rank is its leader and reads its ring; rank 0 decides for all."""

    node_of_rank: tuple[int, ...]
    rank: int  # this rank

    @classmethod
    def all_gather(cls, node: int, count: int) -> NodeTopology:
        """Exchange nodes; this rank is on `node`. Collective; NodeTopologyError if one of `count` has no rank."""
        nodes = all_gather_object(node)
        for missing in sorted(set(range(count)) - set(nodes)):
            raise NodeTopologyError(
                f"no trainer rank is on node {missing} of cluster.nodes={count}, so no rank would read its ring; "
                f"the ranks are on nodes {sorted(set(nodes))}: set --node of each process"
            )
        return cls(tuple(nodes), torch.distributed.get_rank())

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.node_of_rank[self.rank]

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return 1 + max(self.node_of_rank)

    def node_leader(self, node: int) -> int:
        """The rank that reads the ring of a node."""
        return self.node_of_rank.index(node)

    @property
    def node_leaders(self) -> tuple[int, ...]:
        """The leaders of all nodes, rank 0 first."""
        return tuple(self.node_leader(node) for node in dict.fromkeys(self.node_of_rank))

    @property
    def is_node_leader(self) -> bool:
        """Whether this rank is the leader of its node."""
        return self.node_leader(self.node) == self.rank

    def other_ranks_on_node(self, rank: int) -> tuple[int, ...]:
        """The other ranks on the node of `rank`."""
        return tuple(r for r, node in enumerate(self.node_of_rank) if node == self.node_of_rank[rank] and r != rank)

    def rank_name(self, rank: int) -> str:
        """The name of a rank in errors."""
        return f"trainer-{rank} on node {self.node_of_rank[rank]}"

    def broadcast_tree(self, rank: int) -> tuple[int | None, Sequence[int]]:
        """Parent (none for rank 0) and children in broadcasts: a binary tree of leaders, each serving its node."""
        if self.node_leader(self.node_of_rank[rank]) != rank:
            return self.node_leader(self.node_of_rank[rank]), ()
        leaders = self.node_leaders
        place = leaders.index(rank)
        children = leaders[2 * place + 1 : 2 * place + 3]
        return leaders[(place - 1) // 2] if place else None, (*children, *self.other_ranks_on_node(rank))
