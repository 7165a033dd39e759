"""Is this node fit for a job? What only all nodes together can tell: clocks, links, an all-reduce.

The first node hosts a store; those that are fit so far are the members. Each member exchanges data with the next and
with the one before: who fails with both is at fault, its neighbours are not. Then all do an all-reduce.
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
from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from megatron_webrl.preflight.local_checks import CheckFailed

CLOCK_SECONDS = 1.0  # that clocks may differ by
GROUP_SECONDS = 30.0  # limit of forming a group and exchanging data in it
GATHER_SECONDS = 300.0  # limit for all nodes to have looked at themselves
LOCAL_STAGE, LINK_STAGE = "alone", "linked"  # stages: what each has found alone, and with its neighbours
MESSAGE_BYTES = 64 * 2**20
REPEATS = 3
INTERFACE_HINT = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network card where there are several"


@dataclass
class NetworkCheckGroup:
    """This node among all that look at themselves."""

    node_index: int  # of this node, from 0; the first hosts
    node_names: Sequence[str]  # of all nodes
    store: TCPStore

    @classmethod
    def join(
        cls, number: int, names: Sequence[str], address: str, file: Path, seconds: float = GATHER_SECONDS
    ) -> NetworkCheckGroup:
        """Meet at the first node's `address`, whose port it writes to `file`. Raises Unfit after `seconds`."""
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
                    raise CheckFailed(
                        f"{names[0]} did not open the meeting of all nodes within {seconds:.0f} s ({file})"
                    )
                time.sleep(0.1)
            port = int(file.read_text())
            return cls(number, names, TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit))
        except (DistNetworkError, DistStoreError) as error:
            words = str(error).strip().splitlines()
            raise CheckFailed(
                f"no connection to {names[0]} ({address}) within {seconds:.0f} s: {words[0][:200]}"
            ) from error

    def passed_members(self, stage: str, fit: bool, seconds: float = GATHER_SECONDS) -> list[int]:
        """Numbers of the nodes that are fit after a stage; who says nothing within `seconds` is not.

        The first node decides. Raises Unfit if it does not.
        """
        self.store.set(f"{stage}/{self.node_index}", str(int(fit)))
        if self.node_index == 0:
            deadline = time.monotonic() + seconds
            keys = [f"{stage}/{number}" for number in range(len(self.node_names))]
            while (left := [key for key in keys if not self.store.check([key])]) and time.monotonic() < deadline:
                time.sleep(0.05)
            found = [number for number, key in enumerate(keys) if key not in left and self.store.get(key) == b"1"]
            self.store.set(f"{stage}/members", json.dumps(found))
        try:
            self.store.wait([f"{stage}/members"], timedelta(seconds=seconds + GROUP_SECONDS))
            return json.loads(self.store.get(f"{stage}/members"))
        except (DistNetworkError, DistStoreError) as error:
            raise CheckFailed(
                f"{self.node_names[0]} did not say who takes part: {str(error).splitlines()[0][:200]}"
            ) from error

    def leave(self) -> None:
        """Say that this node is done; the first stays until all who were heard of are, or a limit has passed."""
        if self.node_index:
            self.store.set(f"done/{self.node_index}", "1")  # its last word: the first may be gone after it
            return
        deadline = time.monotonic() + 4 * GROUP_SECONDS
        keys = [
            f"done/{number}"
            for number in range(1, len(self.node_names))
            if self.store.check([f"{LOCAL_STAGE}/{number}"])
        ]
        while keys and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


@contextmanager
def clock_server(now: Callable[[], float] = time.time) -> Iterator[int]:
    """Tell the time to whoever connects; yields the port."""
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
    """Seconds that the clock of a node is ahead of this one's. Raises Unfit beyond CLOCK_SECONDS."""
    best = (float("inf"), 0.0)  # round trip, offset
    for _ in range(5):
        began = time.time()
        try:
            with socket.create_connection((host, port), GROUP_SECONDS) as connection:
                data = connection.recv(8, socket.MSG_WAITALL)
        except OSError as error:
            raise CheckFailed(f"{name} ({host}:{port}) does not tell the time: {error}") from error
        ended = time.time()
        best = min(best, (ended - began, struct.unpack("<d", data)[0] - (began + ended) / 2))
    if abs(best[1]) > CLOCK_SECONDS:
        raise CheckFailed(f"differs by {best[1]:+.1f} s from that of {name}; is NTP or chrony running on both?")
    return best[1]


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring of `count`, by rounds in which each takes part at most once."""
    if count < 2:
        return []
    if count == 2:
        return [[(0, 1)]]
    edges = [(first, (first + 1) % count) for first in range(count)]
    found: list[list[tuple[int, int]]] = [[], [], []]
    for first, second in edges:
        found[2 if first == count - 1 and count % 2 else first % 2].append((first, second))
    return [each for each in found if each]


def measure_all_reduce(
    store: Store,
    members: Sequence[str],
    rank: int,
    cuda: bool,
    seconds: float = GROUP_SECONDS,
    size: int = MESSAGE_BYTES,
) -> float:
    """All-reduce among the members, of which this is number `rank`; returns GiB/s (each way, of one member).

    Raises Unfit naming the others.
    """
    others = ", ".join(name for number, name in enumerate(members) if number != rank)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    values = torch.ones(size // 4, device=device)
    try:
        group = _group(store, rank, len(members), cuda, seconds)
        best = float("inf")
        for _ in range(REPEATS):
            values.fill_(1.0)
            began = time.perf_counter()
            group.allreduce([values]).wait()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
    except RuntimeError as error:  # DistError, and what gloo and NCCL raise, are RuntimeErrors
        words = str(error).strip().splitlines() or ["no reason"]
        raise CheckFailed(f"all-reduce with {others} failed: {words[0][:200]} ({INTERFACE_HINT})") from error
    if not bool((values == len(members)).all()):
        raise CheckFailed(f"all-reduce with {others} gave a wrong sum")
    return 2 * (len(members) - 1) / len(members) * size / best / 2**30


def check_links(
    store: Store, members: Sequence[str], rank: int, cuda: bool, minimum: float, seconds: float = GROUP_SECONDS
) -> dict[str, float]:
    """GiB/s with each neighbour. Raises Unfit if it fails, or stays under `minimum`, with all of them.

    Of two nodes that do not get along, the first is taken as good.
    """
    speeds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, pairs in enumerate(pair_rounds(len(members))):
        for pair in pairs:
            if rank not in pair:
                continue
            other = members[pair[1 - pair.index(rank)]]
            place = PrefixStore(f"link/{number}/{pair[0]}", store)
            try:
                # A neighbour that waited for a bad one in each earlier round comes so much later.
                limit = seconds * (number + 1)
                speed = measure_all_reduce(place, [members[each] for each in pair], pair.index(rank), cuda, limit)
                speeds[other] = speed
                if speed < minimum:
                    failed[other] = f"{speed:.2f} GiB/s with {other}, under {minimum:g}"
            except CheckFailed as error:
                failed[other] = str(error)
    met = {*speeds, *failed}
    if met and len(failed) == len(met) and not (len(members) == 2 and rank == 0):
        raise CheckFailed("; ".join(failed.values()))
    return speeds


def all_reduce_store(store: Store) -> Store:
    """Where the members of the last stage meet for `exchange`."""
    return PrefixStore("all", store)


def _group(
    store: Store, rank: int, size: int, cuda: bool, seconds: float
) -> Any:  # gloo's or NCCL's, which a CPU build of torch has not
    if cuda:
        torch.cuda.set_device(0)
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    return ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
