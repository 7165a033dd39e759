"""Messages between trainer ranks over a gloo group of their own: each wait has a limit, each error names the peer.

A message is a JSON value and blobs. On the wire: magic and length | bytes of JSON, number of blobs, length of each blob
(all int64) | JSON | blobs, one after the other.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_webrl.trainer.parallel import all_gather_object

MAGIC = int.from_bytes(b"WEBRLMSG", "little")
_SOURCE_LOCATION = re.compile(r"^\[[^]]*\] ")  # precedes gloo's error messages
MAX_MESSAGE_BYTES = 2**34  # a longer message is an error
Blob = bytes | bytearray | memoryview


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


class RankMessageError(RuntimeError):
    """A message was not sent, not received, or is damaged. The text names the peer."""


@dataclass(frozen=True)
class RankMessage:
    """A received message. Blobs are views of one buffer."""

    content: Any  # JSON
    blobs: tuple[memoryview, ...] = ()


class RankMessenger:
    """Messages of this rank to and from all others. Used by one thread; messages of a pair arrive in order.

    Unusable after an error: a message in flight could arrive in place of another.
    """

    def __init__(self, topology: NodeTopology, timeout_seconds: float, collective_timeout_seconds: float) -> None:
        """Collective. `collective_timeout_seconds`: for a message whose sender itself waits for other ranks."""
        self.topology, self.timeout_seconds = topology, timeout_seconds
        self.collective_timeout_seconds = collective_timeout_seconds
        # A group of its own: messages never mix with collectives, and bytes stay in host memory even with NCCL.
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=collective_timeout_seconds))

    def send(self, peer: int, content: Any, blobs: Sequence[Blob] = ()) -> int:
        """Send a message; returns its bytes. Raises RankMessageError."""
        return self._send(peer, pack_message(content, blobs))

    def receive(self, peer: int, timeout_seconds: float | None = None) -> RankMessage:
        """The next message of a peer. Raises RankMessageError at the timeout, or at once if the peer is gone."""
        return unpack_message(self._receive(peer, timeout_seconds), self.topology.rank_name(peer))

    def broadcast(self, content: Any = None, blobs: Sequence[Blob] = ()) -> RankMessage:
        """The message of rank 0, on every rank. Collective. Raises RankMessageError."""
        parent, children = self.topology.broadcast_tree(self.topology.rank)
        buffer = (
            pack_message(content, blobs) if parent is None else self._receive(parent, self.collective_timeout_seconds)
        )
        for peer in children:
            self._send(peer, buffer)
        return unpack_message(buffer, self.topology.rank_name(self.topology.rank if parent is None else parent))

    def exchange_blobs(
        self, outgoing: Mapping[int, Sequence[Blob]], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """Send blobs to ranks, and receive the number of bytes in `incoming` from each rank, all concurrently.

        Returns the received bytes by sender. Raises RankMessageError.
        """
        deadline = time.monotonic() + self.timeout_seconds
        arriving = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in incoming.items()}
        transfers = [(peer, "send", torch.distributed.irecv(t, peer, self._group)) for peer, t in arriving.items()]
        leaving = {peer: _tensor(bytearray().join(blobs)) for peer, blobs in outgoing.items()}
        transfers += [(peer, "receive", torch.distributed.isend(t, peer, self._group)) for peer, t in leaving.items()]
        for peer, action, work in transfers:
            self._wait(work, peer, action, max(0.001, deadline - time.monotonic()), self.timeout_seconds)
        return {peer: tensor.numpy().data.toreadonly() for peer, tensor in arriving.items()}

    def _send(self, peer: int, buffer: Blob) -> int:
        head = torch.tensor([MAGIC, len(buffer)], dtype=torch.int64)
        for tensor in (head, _tensor(buffer)):
            work = torch.distributed.isend(tensor, peer, self._group)
            self._wait(work, peer, "receive", self.timeout_seconds, self.timeout_seconds)
        return len(buffer)

    def _receive(self, peer: int, timeout_seconds: float | None) -> bytearray:
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        head = torch.empty(2, dtype=torch.int64)
        self._wait(torch.distributed.irecv(head, peer, self._group), peer, "send", limit, limit)
        magic, length = head.tolist()
        if magic != MAGIC or not 0 < length <= MAX_MESSAGE_BYTES:
            raise RankMessageError(
                f"{self.topology.rank_name(peer)} sent {magic:#x} {length} in place of a message header (at most "
                f"{MAX_MESSAGE_BYTES} bytes): the ranks are out of step, or run different programs"
            )
        buffer = bytearray(length)
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


def pack_message(content: Any, blobs: Sequence[Blob] = ()) -> bytearray:
    """A message as bytes."""
    text = json.dumps(content, separators=(",", ":")).encode()
    lengths = struct.pack(f"<{2 + len(blobs)}q", len(text), len(blobs), *map(len, blobs))
    return bytearray().join((lengths, text, *blobs))


def unpack_message(buffer: Blob, sender: str) -> RankMessage:
    """The message in bytes from `sender`. Raises RankMessageError."""
    view = memoryview(bytes(buffer))  # of bytes, so that blobs are hashable
    try:
        size, count = struct.unpack_from("<2q", view)
        lengths = struct.unpack_from(f"<{count}q", view, 16)
        offset = 16 + 8 * count
        if min(size, *lengths, 0) < 0 or offset + size + sum(lengths) != len(view):
            raise ValueError(f"its header says {offset + size + sum(lengths)} bytes")
        content = json.loads(bytes(view[offset : offset + size]))
    except (struct.error, ValueError) as error:
        raise RankMessageError(f"a message of {len(view)} bytes from {sender} is damaged: {error}") from error
    offset += size
    blobs = []
    for length in lengths:
        blobs.append(view[offset : offset + length])
        offset += length
    return RankMessage(content, tuple(blobs))


def _tensor(buffer: Blob) -> Tensor:
    """uint8 [bytes] of a buffer that is not modified."""
    if isinstance(buffer, bytearray):
        return torch.frombuffer(buffer, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8).copy())
