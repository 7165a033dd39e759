"""Which trainer ranks are on which node, and which of them reads the node's ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


class NodeError(RuntimeError):
    """The nodes that the ranks name do not fit the job."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of all trainer ranks, as every rank knows them.

    On each node the lowest rank is its reader: it looks at the ring for the others. The first rank, a reader too,
    decides for all.
    """

    of: tuple[int, ...]  # node of each rank
    rank: int  # this one

    @classmethod
    def meet(cls, node: int, count: int) -> Nodes:
        """Tell all ranks that this one is on `node` of `count`. Collective. Raises NodeError on every rank."""
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, node)
        for missing in sorted(set(range(count)) - set(everyone)):
            raise NodeError(
                f"no trainer rank is on node {missing} of cluster.nodes={count}, so that nobody would read its ring; "
                f"the ranks say that they are on {sorted(set(everyone))}: give each its own --node"
            )
        return cls(tuple(everyone), torch.distributed.get_rank())

    @property
    def node(self) -> int:
        """That of this rank."""
        return self.of[self.rank]

    @property
    def count(self) -> int:
        """Nodes in all."""
        return 1 + max(self.of)

    def reader(self, node: int) -> int:
        """The rank that reads the ring of a node."""
        return self.of.index(node)

    @property
    def readers(self) -> tuple[int, ...]:
        """All of them, the first rank first."""
        return tuple(self.reader(node) for node in dict.fromkeys(self.of))

    @property
    def reads(self) -> bool:
        """Whether this rank is a reader."""
        return self.reader(self.node) == self.rank

    def beside(self, rank: int) -> tuple[int, ...]:
        """The other ranks on the node of a rank."""
        return tuple(other for other, node in enumerate(self.of) if node == self.of[rank] and other != rank)

    def name(self, rank: int) -> str:
        """What errors call a rank."""
        return f"trainer-{rank} on node {self.of[rank]}"

    def tree(self, rank: int) -> tuple[int | None, Sequence[int]]:
        """From whom a rank hears what the first one tells all, and to whom it passes that on.

        Readers form a binary tree, and each tells the ranks of its node.
        """
        if self.reader(self.of[rank]) != rank:
            return self.reader(self.of[rank]), ()
        readers = self.readers
        place = readers.index(rank)
        below = readers[2 * place + 1 : 2 * place + 3]
        return readers[(place - 1) // 2] if place else None, (*below, *self.beside(rank))
