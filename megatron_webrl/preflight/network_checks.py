"""Checks that all nodes of a job do together: clocks, links between neighbours, an all-reduce.

The nodes meet at a store on the first one. Members of a stage are those that have passed so far. Each does an
all-reduce with the next and with the previous one: a node that fails with both is at fault. Then all members do one.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, ProcessGroupGloo, Store, TCPStore

from megatron_webrl.preflight.local_checks import CheckFailed
from megatron_webrl.system.text import first_line

CLOCK_SECONDS = 1.0  # largest difference between two clocks
GROUP_SECONDS = 30.0  # limit for forming a group and exchanging data in it
GATHER_SECONDS = 300.0  # limit for all nodes to finish their local checks
LOCAL_STAGE, LINK_STAGE = "local", "link"  # stages: local checks, links with neighbours
MESSAGE_BYTES = 64 * 2**20
REPEATS = 3
INTERFACE_HINT = "with several network cards set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"


@dataclass
class NetworkCheckGroup:
    """This node's membership in the group of all nodes that are checked."""

    node_index: int  # of this node, from 0; node 0 hosts the store
    node_names: Sequence[str]  # of all nodes
    store: TCPStore

    @classmethod
    def join(
        cls, number: int, names: Sequence[str], address: str, file: Path, seconds: float = GATHER_SECONDS
    ) -> NetworkCheckGroup:
        """Join at node 0's `address`; node 0 writes the port to `file`. Raises CheckFailed after `seconds`."""
        limit = timedelta(seconds=seconds)
        try:
            if number == 0:
                store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
                temporary = file.with_suffix(".tmp")
                temporary.write_text(str(store.port))
                temporary.rename(file)
                return cls(number, names, store)
            deadline = time.monotonic() + seconds
            while not file.is_file():
                if time.monotonic() > deadline:
                    raise CheckFailed(f"{names[0]} did not start the network check within {seconds:.0f} s ({file})")
                time.sleep(0.1)
            port = int(file.read_text())
            return cls(number, names, TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit))
        except (DistNetworkError, DistStoreError) as error:
            raise CheckFailed(
                f"no connection to {names[0]} ({address}) within {seconds:.0f} s: {first_line(error)[:200]}"
            ) from error

    def passed_members(self, stage: str, passed: bool, seconds: float = GATHER_SECONDS) -> list[int]:
        """Indices of the nodes that passed a stage, as node 0 decides; a node that is silent for `seconds` failed.

        Raises CheckFailed if node 0 does not decide.
        """
        self.store.set(f"{stage}/{self.node_index}", str(int(passed)))
        if self.node_index == 0:
            deadline = time.monotonic() + seconds
            keys = [f"{stage}/{number}" for number in range(len(self.node_names))]
            while (silent := [key for key in keys if not self.store.check([key])]) and time.monotonic() < deadline:
                time.sleep(0.05)
            members = [number for number, key in enumerate(keys) if key not in silent and self.store.get(key) == b"1"]
            self.store.set(f"{stage}/members", json.dumps(members))
        try:
            self.store.wait([f"{stage}/members"], timedelta(seconds=seconds + GROUP_SECONDS))
            return json.loads(self.store.get(f"{stage}/members"))
        except (DistNetworkError, DistStoreError) as error:
            raise CheckFailed(
                f"{self.node_names[0]} did not list the members of the {stage} stage: {first_line(error)[:200]}"
            ) from error

    def leave(self) -> None:
        """Report this node as done; node 0 waits until all nodes that joined are done, within a limit."""
        if self.node_index:
            self.store.set(f"done/{self.node_index}", "1")  # must be last: node 0 may exit after it
            return
        deadline = time.monotonic() + 4 * GROUP_SECONDS
        keys = [f"done/{i}" for i in range(1, len(self.node_names)) if self.store.check([f"{LOCAL_STAGE}/{i}"])]
        while keys and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


@contextmanager
def clock_server(now: Callable[[], float] = time.time) -> Iterator[int]:
    """Serve this node's time over TCP; yields the port."""
    with socket.create_server(("", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # closed
                with connection:
                    connection.sendall(struct.pack("<d", now()))

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread


def clock_offset(host: str, port: int, name: str) -> float:
    """Seconds by which a node's clock is ahead of this node's. Raises CheckFailed beyond CLOCK_SECONDS."""
    best = (float("inf"), 0.0)  # round trip, offset
    for _ in range(5):
        sent_at = time.time()
        try:
            with socket.create_connection((host, port), GROUP_SECONDS) as connection:
                data = connection.recv(8, socket.MSG_WAITALL)
        except OSError as error:
            raise CheckFailed(f"{name} ({host}:{port}) did not report its time: {error}") from error
        received_at = time.time()
        best = min(best, (received_at - sent_at, struct.unpack("<d", data)[0] - (sent_at + received_at) / 2))
    if abs(best[1]) > CLOCK_SECONDS:
        raise CheckFailed(f"differs by {best[1]:+.1f} s from the clock of {name}; run NTP or chrony on both")
    return best[1]


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a circle of `count` members, in rounds that contain each member at most once."""
    if count < 2:
        return []
    if count == 2:
        return [[(0, 1)]]
    edges = [(first, (first + 1) % count) for first in range(count)]
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for first, second in edges:
        rounds[2 if first == count - 1 and count % 2 else first % 2].append((first, second))
    return [pairs for pairs in rounds if pairs]


def measure_all_reduce(
    store: Store,
    members: Sequence[str],
    rank: int,
    cuda: bool,
    seconds: float = GROUP_SECONDS,
    size: int = MESSAGE_BYTES,
) -> float:
    """Best GiB/s, each way, of REPEATS all-reduces of `size` bytes. Raises CheckFailed naming the other members."""
    others = ", ".join(name for number, name in enumerate(members) if number != rank)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    values = torch.ones(size // 4, device=device)
    try:
        group = _group(store, rank, len(members), cuda, seconds)
        best = float("inf")
        for _ in range(REPEATS):
            values.fill_(1.0)
            started_at = time.perf_counter()
            group.allreduce([values]).wait()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started_at)
    except RuntimeError as error:  # the base of DistError and of the errors of gloo and NCCL
        raise CheckFailed(f"all-reduce with {others} failed: {first_line(error)[:200]} ({INTERFACE_HINT})") from error
    if not bool((values == len(members)).all()):
        raise CheckFailed(f"all-reduce with {others} gave a wrong sum")
    return 2 * (len(members) - 1) / len(members) * size / best / 2**30


def check_links(
    store: Store, members: Sequence[str], rank: int, cuda: bool, minimum: float, seconds: float = GROUP_SECONDS
) -> dict[str, float]:
    """GiB/s with each neighbour. Raises CheckFailed if all fail or are below `minimum`; of only two nodes, 0 passes."""
    speeds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, pairs in enumerate(pair_rounds(len(members))):
        for pair in pairs:
            if rank not in pair:
                continue
            other = members[pair[1 - pair.index(rank)]]
            pair_store = PrefixStore(f"link/{number}/{pair[0]}", store)
            try:
                limit = seconds * (number + 1)  # the neighbour may have waited for a bad node in each earlier round
                names = [members[member] for member in pair]
                speed = measure_all_reduce(pair_store, names, pair.index(rank), cuda, limit)
                speeds[other] = speed
                if speed < minimum:
                    failed[other] = f"{speed:.2f} GiB/s with {other}, below {minimum:g}"
            except CheckFailed as error:
                failed[other] = str(error)
    neighbours = {*speeds, *failed}
    if neighbours and len(failed) == len(neighbours) and not (len(members) == 2 and rank == 0):
        raise CheckFailed("; ".join(failed.values()))
    return speeds


def all_reduce_store(store: Store) -> Store:
    """The store of the final all-reduce among all members."""
    return PrefixStore("all", store)


def _group(store: Store, rank: int, size: int, cuda: bool, seconds: float) -> Any:
    if cuda:  # a CPU build of torch has no ProcessGroupNCCL, not even for a type annotation
        torch.cuda.set_device(0)
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    return ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
