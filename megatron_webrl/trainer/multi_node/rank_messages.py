"""Messages between trainer ranks over a gloo group of their own: each wait has a limit, each error names the peer."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from megatron_webrl.trainer.parallel import all_gather_object

_SOURCE_LOCATION = re.compile(r"^\[[^]]*\] ")  # precedes gloo's error messages


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
        own = (peer for peer, node in enumerate(self.node_of_rank) if node == self.node_of_rank[rank] and peer != rank)
        return leaders[(place - 1) // 2] if place else None, (*children, *own)


class RankMessageError(RuntimeError):
    """A message was not sent, not received, or has another size than expected. The text names the peer."""


class RankMessenger:
    """Messages of this rank to and from all others: values that can be pickled. Messages of a pair arrive in order.

    Unusable after an error: a message in flight could arrive in place of another. Used by one thread.
    """

    def __init__(self, topology: NodeTopology, timeout_seconds: float, collective_timeout_seconds: float) -> None:
        """Collective. `collective_timeout_seconds`: for a message whose sender itself waits for other ranks."""
        self.topology, self.timeout_seconds = topology, timeout_seconds
        self.collective_timeout_seconds = collective_timeout_seconds
        # A group of its own: messages never mix with collectives, and bytes stay in host memory even with NCCL.
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=collective_timeout_seconds))

    def send(self, peer: int, message: Any) -> int:
        """Send a message; returns its bytes. Raises RankMessageError."""
        return self._send(peer, bytearray(pickle.dumps(message)))

    def receive(self, peer: int, timeout_seconds: float | None = None) -> Any:
        """The next message of a peer. Raises RankMessageError at the timeout, or at once if the peer is gone."""
        return pickle.loads(self._receive(peer, self.timeout_seconds if timeout_seconds is None else timeout_seconds))

    def broadcast(self, message: Any = None) -> Any:
        """The message of rank 0, on every rank. Collective. Raises RankMessageError."""
        parent, children = self.topology.broadcast_tree(self.topology.rank)
        if parent is None:
            buffer = bytearray(pickle.dumps(message))
        else:
            buffer = self._receive(parent, self.collective_timeout_seconds)
        for peer in children:
            self._send(peer, buffer)
        return pickle.loads(buffer)

    def exchange_blobs(
        self, outgoing: Mapping[int, Sequence[bytes]], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """Send blobs to ranks, and receive the number of bytes in `incoming` from each rank, all concurrently.

        Returns the received bytes by sender. Raises RankMessageError.
        """
        deadline = time.monotonic() + self.timeout_seconds
        arriving = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in incoming.items()}
        transfers = [(peer, "send", torch.distributed.irecv(t, peer, self._group)) for peer, t in arriving.items()]
        leaving = {
            peer: torch.frombuffer(bytearray().join(blobs), dtype=torch.uint8) for peer, blobs in outgoing.items()
        }
        transfers += [(peer, "receive", torch.distributed.isend(t, peer, self._group)) for peer, t in leaving.items()]
        for peer, action, work in transfers:
            self._wait(work, peer, action, max(0.001, deadline - time.monotonic()), self.timeout_seconds)
        return {peer: tensor.numpy().data.toreadonly() for peer, tensor in arriving.items()}

    def _send(self, peer: int, buffer: bytearray) -> int:
        for tensor in (torch.tensor([len(buffer)]), torch.frombuffer(buffer, dtype=torch.uint8)):
            work = torch.distributed.isend(tensor, peer, self._group)
            self._wait(work, peer, "receive", self.timeout_seconds, self.timeout_seconds)
        return len(buffer)

    def _receive(self, peer: int, limit: float) -> bytearray:
        size = torch.empty(1, dtype=torch.int64)
        self._wait(torch.distributed.irecv(size, peer, self._group), peer, "send", limit, limit)
        buffer = bytearray(int(size))
        body = torch.distributed.irecv(torch.frombuffer(buffer, dtype=torch.uint8), peer, self._group)
        self._wait(body, peer, "send", self.timeout_seconds, self.timeout_seconds)
        return buffer

    def _wait(self, work: Any, peer: int, action: str, left: float, limit: float) -> None:
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            timed_out = time.monotonic() - started >= 0.99 * left
            how = f"did not {action} a message within {limit:g} s" if timed_out else "is gone"
            reason = _SOURCE_LOCATION.sub("", str(error).splitlines()[0])
            raise RankMessageError(f"{self.topology.rank_name(peer)} {how}: {reason}") from error
