"""One-to-all weight transfer over a process group of its own, beside everyone's default group.

Rank 0 (the trainer) sends, all others receive. A transfer is: every rank shows its manifest's digest; rank 0
broadcasts bucket after bucket; every rank says that it is through. Each wait has the group's limit. When one
rank fails, it says why in the store and leaves the group, which makes the others fail at once and not only
at their limit; each of them then names the ranks that said so and the ranks that said nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_webrl.weights.manifest import Bucket, Manifest

log = logging.getLogger(__name__)

ROLL_CALL_SECONDS = 3.0
"""How long a failed rank waits for the word of the others. All notice within moments, or are gone."""
_POLL_SECONDS = 0.0005
_FAILURE_CHECK_SECONDS = 0.25
_DIGEST_BYTES = 32


class TransferError(RuntimeError):
    """A transfer did not complete. The group is closed; what was received may be incomplete."""


@dataclass
class Group:
    """A joined transfer group. After a failure it is closed and every further use raises TransferError."""

    name: str
    rank: int
    size: int
    seconds: float  # limit of every wait
    device: torch.device  # where buckets live
    store: Any  # torch.distributed.Store, with a prefix of its own
    process_group: Any
    transfers: int = 0  # begun so far
    members: list[str] = field(default_factory=list)  # "host:pid" by rank
    closed_because: str | None = None

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self.process_group is not None:
            group, self.process_group = self.process_group, None
            if hasattr(group, "abort"):
                group.abort()
        self.closed_because = self.closed_because or "it was closed"


def join(store: dist.Store, name: str, rank: int, size: int, seconds: float, backend: Literal["gloo", "nccl"]) -> Group:
    """Form the group `name` of `size` ranks; blocks until all are there.

    A name serves for one group only: give each incarnation its own. Raises TransferError naming the ranks
    that did not come within `seconds`.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside 0..{size - 1} (transfer group {name})")
    limit = timedelta(seconds=seconds)
    prefixed = dist.PrefixStore(f"transfer/{name}", store)
    prefixed.set(f"member/{rank}", f"{socket.gethostname()}:{os.getpid()}")
    missing = _await_keys(prefixed, [f"member/{other}" for other in range(size)], seconds)
    if missing:
        ranks = ", ".join(key.rpartition("/")[2] for key in missing)
        raise TransferError(f"transfer group {name}: rank {ranks} of {size} did not join within {seconds:g} s")
    members = [prefixed.get(f"member/{other}").decode() for other in range(size)]
    device = torch.device("cpu")
    process_group: Any
    try:
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            process_group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            process_group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", prefixed), rank, size, limit)
    except RuntimeError as error:
        raise TransferError(
            f"transfer group {name}: rank {rank} could not connect to {', '.join(members)}: {error}"
        ) from error
    return Group(name, rank, size, seconds, device, prefixed, process_group, members=members)


def send(group: Group, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int) -> None:
    """Broadcast `tensors`, which must be those of `manifest` in its order. Rank 0 only.

    Returns when every rank has taken everything in. Raises TransferError.
    """
    if group.rank != 0:
        raise ValueError(f"rank {group.rank} cannot send; rank 0 does (transfer group {group.name})")
    with _Transfer(group) as transfer:
        transfer.compare(manifest, bucket_bytes)
        source = _Source(manifest, tensors)
        for number, bucket in enumerate(manifest.buckets(bucket_bytes)):
            buffer = torch.empty(bucket.bytes, dtype=torch.uint8, device=group.device)
            source.fill(buffer, bucket)
            transfer.broadcast(buffer, f"bucket {number}")
        source.check_end()
        transfer.confirm()


def receive(
    group: Group, manifest: Manifest, bucket_bytes: int, device: torch.device | str
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Receive the tensors of `manifest` in its order, on `device`. All ranks but 0.

    Each tensor owns its memory (shared with its bucket's neighbours) and stays valid. The iterator must be
    read to its end, else the transfer fails for all. Raises TransferError.
    """
    device = torch.device(device)
    with _Transfer(group) as transfer:
        transfer.compare(manifest, bucket_bytes)
        following = 0  # index of the entry to yield next; empty tensors are in no bucket
        partial: torch.Tensor | None = None  # bytes of a tensor that goes over several buckets
        for number, bucket in enumerate(manifest.buckets(bucket_bytes)):
            buffer = torch.empty(bucket.bytes, dtype=torch.uint8, device=group.device)
            transfer.broadcast(buffer, f"bucket {number}")
            for piece in bucket.pieces:
                entry = manifest.entries[piece.entry]
                part = buffer[piece.offset : piece.offset + piece.stop - piece.start]
                if piece.stop - piece.start < entry.bytes:
                    if piece.start == 0:
                        partial = torch.empty(entry.bytes, dtype=torch.uint8, device=group.device)
                    assert partial is not None
                    partial[piece.start : piece.stop] = part
                    part = partial
                if piece.stop == entry.bytes:
                    yield from _empties(manifest, following, piece.entry, device)
                    yield entry.name, part.view(getattr(torch, entry.dtype)).view(entry.shape).to(device)
                    following = piece.entry + 1
        yield from _empties(manifest, following, len(manifest.entries), device)
        transfer.confirm()


def _empties(manifest: Manifest, start: int, stop: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in manifest.entries[start:stop]:
        yield entry.name, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)


class _Source:
    """The sender's tensors as a stream of bytes, checked against the manifest one by one."""

    def __init__(self, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._manifest, self._tensors = manifest, iter(tensors)
        self._index = -1
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, buffer: torch.Tensor, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            while self._index < piece.entry:
                self._next()
            buffer[piece.offset : piece.offset + piece.stop - piece.start].copy_(self._bytes[piece.start : piece.stop])

    def check_end(self) -> None:
        while self._index < len(self._manifest.entries) - 1:
            self._next()  # empty tensors at the end fill no bucket
        if (extra := next(self._tensors, None)) is not None:
            raise ValueError(f"the sender has tensor {extra[0]} after the manifest's last")

    def _next(self) -> None:
        self._index += 1
        entry = self._manifest.entries[self._index]
        name, tensor = next(self._tensors, ("nothing", torch.empty(0)))
        found = (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (entry.name, entry.shape, entry.dtype):
            raise ValueError(f"the sender has {found} where the manifest has {(entry.name, entry.shape, entry.dtype)}")
        self._bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Transfer:
    """One transfer of one rank: its collectives, and what it tells the others if it fails."""

    def __init__(self, group: Group) -> None:
        if group.process_group is None:
            raise TransferError(f"transfer group {group.name} cannot be used: {group.closed_because}")
        self._group = group
        group.transfers += 1
        self._prefix = f"failed/{group.transfers}"

    def __enter__(self) -> _Transfer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        reason = f"{kind.__name__ if kind else ''}: {error}" if str(error) else repr(error)
        lines = self._fail(reason)
        if isinstance(error, GeneratorExit):
            return  # raising here is not allowed; whoever stopped reading knows why
        what = f"transfer {self._group.transfers} of group {self._group.name}"
        raise TransferError(f"{what} failed on rank {self._group.rank}: {reason}{lines}") from error

    def compare(self, manifest: Manifest, bucket_bytes: int) -> None:
        """See that all ranks carry the same tensors in the same buckets."""
        group = self._group
        mine = (
            bytes.fromhex(manifest.digest())
            + bucket_bytes.to_bytes(8, "little")
            + len(manifest.entries).to_bytes(8, "little")
        )
        rows = self._gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), "manifest digests")
        different = [rank for rank in range(group.size) if rows[rank] != rows[0]]
        if different:
            shown = "; ".join(
                f"rank {rank} ({group.members[rank]}) has {_describe(rows[rank])}" for rank in [0, *different]
            )
            raise ValueError(f"manifests differ: {shown}")

    def broadcast(self, buffer: torch.Tensor, what: str) -> None:
        """Rank 0's buffer to all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(self._live().broadcast([buffer], options), what)

    def confirm(self) -> None:
        """Return once every rank is through."""
        self._gather(torch.ones(1, dtype=torch.uint8), "confirmations")

    def _gather(self, row: torch.Tensor, what: str) -> list[bytes]:
        row = row.to(self._group.device)
        rows = [torch.empty_like(row) for _ in range(self._group.size)]
        self._wait(self._live().allgather([rows], [row]), what)
        return [bytes(other.cpu().tolist()) for other in rows]

    def _live(self) -> Any:
        if self._group.process_group is None:
            raise RuntimeError(f"the group was closed: {self._group.closed_because}")
        return self._group.process_group

    def _wait(self, work: Any, what: str) -> None:
        # Not work.wait(): NCCL's returns before the data is there and never sees a dead peer, and gloo's cannot
        # look at the store meanwhile.
        began = checked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now - began > self._group.seconds:
                raise TimeoutError(f"{what} did not come within {self._group.seconds:g} s")
            if now - checked > _FAILURE_CHECK_SECONDS:
                checked = now
                if self._failures():
                    raise RuntimeError(f"another rank failed while this one waited for {what}")
            time.sleep(_POLL_SECONDS)
        work.wait()  # completed: raises what went wrong
        if self._group.device.type == "cuda":
            torch.cuda.current_stream(self._group.device).synchronize()

    def _failures(self) -> dict[int, str]:
        found = {}
        for rank in range(self._group.size):
            key = f"{self._prefix}/{rank}"
            if self._group.store.check([key]):
                found[rank] = self._group.store.get(key).decode()
        return found

    def _fail(self, reason: str) -> str:
        """Tell the others, leave the group, and hear who else failed; returns what to add to the error."""
        group = self._group
        others = [rank for rank in range(group.size) if rank != group.rank]
        try:
            first = self._failures()
            group.store.set(f"{self._prefix}/{group.rank}", reason)
            group.closed_because = f"transfer {group.transfers} failed ({reason})"
            group.close()
            _await_keys(group.store, [f"{self._prefix}/{rank}" for rank in others], ROLL_CALL_SECONDS)
            heard = self._failures()
        except RuntimeError as error:
            group.closed_because = f"transfer {group.transfers} failed ({reason})"
            group.close()
            return f"; the store did not answer either: {error}"
        said = [
            f"rank {rank} ({group.members[rank]}) failed first: {text}"
            for rank, text in first.items()
            if rank != group.rank
        ]
        silent = [f"rank {rank} ({group.members[rank]})" for rank in others if rank not in heard]
        lines = "".join(f"; {line}" for line in said)
        return lines + (
            f"; not heard of within {ROLL_CALL_SECONDS:g} s, dead or cut off: {', '.join(silent)}" if silent else ""
        )


def _describe(row: bytes) -> str:
    bucket, count = (int.from_bytes(row[start : start + 8], "little") for start in (_DIGEST_BYTES, _DIGEST_BYTES + 8))
    return f"{count} tensors, digest {row[:_DIGEST_BYTES].hex()[:12]}, buckets of {bucket} bytes"


def _await_keys(store: Any, keys: list[str], seconds: float) -> list[str]:
    """Wait until all keys are in the store; returns those that are not after `seconds`."""
    deadline = time.monotonic() + seconds
    while missing := [key for key in keys if not store.check([key])]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return missing
