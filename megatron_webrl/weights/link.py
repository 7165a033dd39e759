"""Link: a separate process group of the trainer ranks that send to an engine and the engine's ranks.

It carries only point-to-point operations. The group has a store of its own, hosted by link rank 0, which is closed with
the link. The control service holds the link's state: members, announced and completed transfers, and the error of the
first failed rank.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_webrl.control.connection import Connection
from megatron_webrl.control.group_store import connect_group_store, host_group_store
from megatron_webrl.weights.link_channels import GRACE_SECONDS, GlooChannel, NcclChannel, error_summary, poll_until
from megatron_webrl.weights.link_nccl import make_nccl_group

CPU = torch.device("cpu")
JOIN_POLL_SECONDS = 0.01
_REFUSED, _FAILED = "refused", "failed"  # keys
_STORE = "store"  # key of the address of the group's store


class TransferError(RuntimeError):
    """A transfer or a link failed. The link is closed; received weights may be incomplete."""


class LinkFacts:
    """The facts of one link, out of those of the job, so that a member that ends takes none with it. Values are bytes.

    Methods raise ControlLost, a RuntimeError, if the control service does not answer.
    """

    def __init__(self, control: Connection, name: str) -> None:
        self._control, self._prefix = control, f"link/{name}/"

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else value.decode("latin-1")  # a character for each byte
        self._run("put", self._prefix + key, text)

    def get(self, key: str) -> bytes:
        """The value of a key. Raises KeyError without one."""
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return None not in self._read(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys. Raises KeyError if one has none."""
        values = dict(zip(keys, self._read(keys), strict=True))
        if missing := [key for key, value in values.items() if value is None]:
            raise KeyError(self._prefix + missing[0])
        return [value.encode("latin-1") for value in values.values()]

    def set_first(self, key: str, value: str) -> str:
        """Set a key unless another rank has; returns its value."""
        return str(self._run("put_if_absent", self._prefix + key, value))

    def delete_key(self, key: str) -> None:
        self._run("put", self._prefix + key, None)

    def _read(self, keys: Sequence[str]) -> list[Any]:
        values: list[Any] = self._run("get", [self._prefix + key for key in keys])
        return values

    def _run(self, *command: Any) -> Any:
        return self._control.sync([command])["replies"][0]


@dataclass
class TransferLink:
    """A joined link. After a failure it is closed and every further use raises TransferError.

    Link ranks: the trainer ranks that send to the engine, in ascending order, then the engine's ranks 0..n-1.
    """

    name: str
    rank: int
    size: int
    timeout_seconds: float  # timeout of joining
    message_device: torch.device
    parameter_device: torch.device  # of this rank; not the messages' if weights travel through the host
    store: LinkFacts
    group_store: Any  # the process group's own torch.distributed.Store
    process_group: Any
    channel: GlooChannel | NcclChannel
    member_names: list[str] = field(default_factory=list)  # "host:pid" by rank
    last_completed: int = -1  # number of the last transfer that this rank completed
    staging_buffers: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot, kept between transfers
    close_reason: str | None = None

    def describe_rank(self, rank: int) -> str:
        """Rank with its host and process id, for messages."""
        return f"rank {rank} ({self.member_names[rank]})"

    def first_failure(self) -> str | None:
        """Error of the first failed rank, if any. Raises RuntimeError when the store does not answer."""
        return self.store.get(_FAILED).decode() if self.store.check([_FAILED]) else None

    def fail(self, reason: str) -> TransferError:
        """Publish this rank's error in the store and close the link; the returned error names the first failure."""
        own_error = f"{self.describe_rank(self.rank)}: {reason}"
        text = f"link {self.name} failed on {own_error}"
        try:
            first = self.store.set_first(_FAILED, own_error)
            if first != own_error:
                text += f"; first to fail was {first}"
        except RuntimeError as error:
            text += f"; the store did not answer either: {error_summary(error)}"
        self.close(text)
        return TransferError(text)

    def close(self, reason: str = "it was closed") -> None:
        """Leave the link; operations in flight fail here and at the peers. Idempotent."""
        if self.process_group is not None:
            self.process_group = self.group_store = None
            self.channel.close()
            self.staging_buffers.clear()
        self.close_reason = self.close_reason or reason


def join_link(
    control: Connection,
    name: str,
    rank: int,
    size: int,
    timeout_seconds: float,
    backend: Literal["gloo", "nccl"],
    parameter_device: torch.device = CPU,
    senders: int = 1,
) -> TransferLink:
    """Form the link `name` of `size` ranks; blocks until all have joined. A restarted engine needs a new name.

    `control`: of the job. Messages of gloo are in host memory, wherever this rank's parameters are; with NCCL
    both are on the current GPU, and each of the first `senders` ranks is connected to each of the others.

    Raises TransferError naming ranks that did not join within `timeout_seconds`, at once if an engine rejects the link
    or another rank fails, and GRACE_SECONDS later if a rank stops after it has joined.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside 0..{size - 1} (link {name})")
    deadline = time.monotonic() + timeout_seconds
    scoped = LinkFacts(control, name)
    own_name = f"{socket.gethostname()}:{os.getpid()}"
    try:
        hosted = None
        if rank == 0:
            service = control.connect()
            hosted, address = host_group_store(service.host, service.port, timeout_seconds + GRACE_SECONDS)
            scoped.set(_STORE, json.dumps(address))
    except (OSError, RuntimeError) as error:
        raise TransferError(f"link {name}: rank 0 ({own_name}) cannot host a store: {error_summary(error)}") from error
    members = _await_members(scoped, name, rank, size, own_name, timeout_seconds)
    seconds = max(deadline - time.monotonic(), GRACE_SECONDS)
    gpu = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None

    def form() -> tuple[Any, Any]:
        own = hosted or connect_group_store(json.loads(scoped.get(_STORE)), seconds)
        if gpu is not None:
            return own, make_nccl_group(own, rank, size, senders, seconds, gpu)
        return own, dist.ProcessGroupGloo(own, rank, size, timedelta(seconds=seconds))

    try:
        group_store, group = _run_limited(form, seconds, lambda: scoped.check([_FAILED]))
    except RuntimeError as error:
        reason = f"rank {rank} ({own_name}) could not connect to {', '.join(members)}: {error_summary(error)}"
        first = scoped.set_first(_FAILED, reason)
        text = f"link {name}: {reason}"
        raise TransferError(text if first == reason else f"{text}; first to fail was {first}") from error
    peers = [other for other in range(size) if other != rank]
    channel = GlooChannel(group, peers) if gpu is None else NcclChannel(group)
    devices = (CPU, parameter_device) if gpu is None else (gpu, gpu)
    return TransferLink(name, rank, size, timeout_seconds, *devices, scoped, group_store, group, channel, members)


def reject_link(control: Connection, name: str, reason: str) -> None:
    """Publish why this rank will not join link `name`."""
    LinkFacts(control, name).set(_REFUSED, reason)


def _await_members(
    scoped: LinkFacts, name: str, rank: int, size: int, own_name: str, timeout_seconds: float
) -> list[str]:
    """Announce this rank and wait for the others; returns the names of all by rank. Raises TransferError."""
    scoped.set(f"done/{rank}", "-1")  # last completed transfer
    scoped.set(f"member/{rank}", own_name)
    missing = _missing_keys(scoped, [f"member/{other}" for other in range(size)], timeout_seconds)
    if missing and scoped.check([_REFUSED]):
        raise TransferError(f"link {name} was refused: {scoped.get(_REFUSED).decode()}")
    if missing:
        ranks = ", ".join(key.rpartition("/")[2] for key in missing)
        raise TransferError(f"link {name}: rank {ranks} of {size} did not join within {timeout_seconds:g} s")
    return [scoped.get(f"member/{other}").decode() for other in range(size)]


def _missing_keys(store: Any, keys: list[str], seconds: float) -> list[str]:
    """Wait for keys of the store; returns those missing after `seconds` or when a rank rejects the link."""
    poll_until(lambda: store.check(keys) or store.check([_REFUSED]), seconds, JOIN_POLL_SECONDS)
    return [] if store.check(keys) else [key for key in keys if not store.check([key])]


def _run_limited(make: Callable[[], Any], seconds: float, cancelled: Callable[[], bool]) -> Any:
    """Result of `make`. It runs in a thread, because torch waits for ever for a store whose host is stopped.

    Raises RuntimeError after `seconds` or once `cancelled` returns true; the thread is left behind and its result is
    dropped. Raises the exception of `make`.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(make())
        except Exception as error:  # raised again below
            outcome.append(error)

    threading.Thread(target=run, name="webrl-link-join", daemon=True).start()
    poll_until(lambda: bool(outcome) or cancelled(), seconds, JOIN_POLL_SECONDS)
    if not outcome:
        raise RuntimeError("another rank failed" if cancelled() else f"a rank did not answer within {seconds:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
