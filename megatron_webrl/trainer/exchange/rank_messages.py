"""Messages between trainer ranks: bytes over a process group of the CPU, each wait with a limit and a name.

A message is a JSON value and blobs. On the wire: magic and length (two int64), then

    bytes of JSON | number of blobs | length of each blob      int64
    JSON | blobs, one after the other
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

from megatron_webrl.trainer.exchange.node_topology import NodeTopology

MAGIC = int.from_bytes(b"WEBRLMSG", "little")
_PLACE = re.compile(r"^\[[^]]*\] ")  # in gloo's source, before its words
MAX_MESSAGE_BYTES = 2**34
"""A longer message is an error: something is wrong with it."""
Blob = bytes | bytearray | memoryview


class RankMessageError(RuntimeError):
    """A message did not come, did not go, or is not one. The text names the peer."""


@dataclass(frozen=True)
class RankMessage:
    """What `Wire.send` was given. Blobs are views of one buffer."""

    content: Any  # JSON
    blobs: tuple[memoryview, ...] = ()


class RankMessenger:
    """The connections of this rank to all others. Used by one thread; messages of a pair arrive in order.

    After an error the wire is of no more use: what was under way may arrive in the place of something else.
    """

    def __init__(self, nodes: NodeTopology, seconds: float, patience: float) -> None:
        """Collective. `seconds`: limit of one message; `patience`: the same where the peer itself waits for others."""
        self.topology, self.timeout_seconds, self.collective_timeout_seconds = nodes, seconds, patience
        # Of its own: messages never mix with collectives, and their bytes stay in host memory with NCCL, too.
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=patience))

    def send(self, peer: int, content: Any, blobs: Sequence[Blob] = ()) -> int:
        """Send a message; returns its bytes. Raises WireError."""
        return self._send(peer, pack_message(content, blobs))

    def receive(self, peer: int, seconds: float | None = None) -> RankMessage:
        """The next message of a peer. Raises WireError naming it after `seconds`, or at once if it is gone."""
        return unpack_message(self._receive(peer, seconds), self.topology.rank_name(peer))

    def broadcast(self, content: Any = None, blobs: Sequence[Blob] = ()) -> RankMessage:
        """What the first rank gives, on every rank. Collective. Raises WireError."""
        above, below = self.topology.broadcast_tree(self.topology.rank)
        buffer = (
            pack_message(content, blobs) if above is None else self._receive(above, self.collective_timeout_seconds)
        )
        for peer in below:
            self._send(peer, buffer)
        return unpack_message(buffer, self.topology.rank_name(self.topology.rank if above is None else above))

    def broadcast_on_node(self, content: Any = None) -> Any:
        """What the reader of this node gives, on every rank of the node. Collective over those."""
        if not self.topology.is_node_leader:
            return self.receive(self.topology.node_leader(self.topology.node)).content
        for peer in self.topology.other_ranks_on_node(self.topology.rank):
            self.send(peer, content)
        return content

    def exchange_blobs(
        self, outgoing: Mapping[int, Sequence[Blob]], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """Send blobs to ranks and receive as many bytes from others as is known here, all at the same time.

        Returns what came from whom. Raises WireError naming who was waited for.
        """
        deadline = time.monotonic() + self.timeout_seconds
        arriving = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in incoming.items()}
        waits = [(peer, "send", torch.distributed.irecv(t, peer, self._group)) for peer, t in arriving.items()]
        leaving = {peer: _tensor(bytearray().join(blobs)) for peer, blobs in outgoing.items()}
        waits += [(peer, "take", torch.distributed.isend(t, peer, self._group)) for peer, t in leaving.items()]
        for peer, what, work in waits:
            self._wait(work, peer, what, max(0.001, deadline - time.monotonic()), self.timeout_seconds)
        return {peer: tensor.numpy().data.toreadonly() for peer, tensor in arriving.items()}

    def _send(self, peer: int, buffer: Blob) -> int:
        head = torch.tensor([MAGIC, len(buffer)], dtype=torch.int64)
        for tensor in (head, _tensor(buffer)):
            self._wait(
                torch.distributed.isend(tensor, peer, self._group),
                peer,
                "take",
                self.timeout_seconds,
                self.timeout_seconds,
            )
        return len(buffer)

    def _receive(self, peer: int, seconds: float | None) -> bytearray:
        limit = self.timeout_seconds if seconds is None else seconds
        head = torch.empty(2, dtype=torch.int64)
        self._wait(torch.distributed.irecv(head, peer, self._group), peer, "send", limit, limit)
        magic, length = head.tolist()
        if magic != MAGIC or not 0 < length <= MAX_MESSAGE_BYTES:
            raise RankMessageError(
                f"{self.topology.rank_name(peer)} sent no message but {magic:#x} {length}, at most {MAX_MESSAGE_BYTES} bytes are "
                "expected: the ranks are out of step, or run different programs"
            )
        buffer = bytearray(length)
        body = torch.frombuffer(buffer, dtype=torch.uint8)
        self._wait(
            torch.distributed.irecv(body, peer, self._group), peer, "send", self.timeout_seconds, self.timeout_seconds
        )
        return buffer

    def _wait(self, work: Any, peer: int, what: str, left: float, limit: float) -> None:
        begun = time.monotonic()
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            waited = time.monotonic() - begun
            how = f"did not {what} what was due within {limit:g} s" if waited >= 0.99 * left else "is gone"
            raise RankMessageError(
                f"{self.topology.rank_name(peer)} {how}: {_PLACE.sub('', str(error).splitlines()[0])}"
            ) from error


def pack_message(content: Any, blobs: Sequence[Blob] = ()) -> bytearray:
    """A message as bytes."""
    text = json.dumps(content, separators=(",", ":")).encode()
    lengths = struct.pack(f"<{2 + len(blobs)}q", len(text), len(blobs), *map(len, blobs))
    return bytearray().join((lengths, text, *blobs))


def unpack_message(buffer: Blob, name: str) -> RankMessage:
    """The message in bytes that came from `name`. Raises WireError."""
    view = memoryview(bytes(buffer))  # of bytes, so that blobs can be keys
    try:
        size, count = struct.unpack_from("<2q", view)
        lengths = struct.unpack_from(f"<{count}q", view, 16)
        place = 16 + 8 * count
        if min(size, *lengths, 0) < 0 or place + size + sum(lengths) != len(view):
            raise ValueError(f"it speaks of {place + size + sum(lengths)} bytes")
        content = json.loads(bytes(view[place : place + size]))
    except (struct.error, ValueError) as error:
        raise RankMessageError(f"a message of {len(view)} bytes from {name} is damaged: {error}") from error
    place += size
    blobs = []
    for length in lengths:
        blobs.append(view[place : place + length])
        place += length
    return RankMessage(content, tuple(blobs))


def _tensor(buffer: Blob) -> Tensor:
    """uint8 [bytes], of a buffer that stays as it is."""
    if isinstance(buffer, bytearray):
        return torch.frombuffer(buffer, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8).copy())
