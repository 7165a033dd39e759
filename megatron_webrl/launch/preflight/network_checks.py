"""Checks that all nodes of a job do together: clocks, links between neighbours, an all-reduce.

The nodes meet at a store on the first one. Members of a stage are those that have passed so far. Each GPU does an
all-reduce with the same GPU of the next node, and with that of the previous one; blame.py decides which nodes are at
fault. Then all GPUs of all members do one.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from megatron_webrl.launch.preflight.blame import LinkResults, blame_group, blame_links
from megatron_webrl.launch.preflight.exchange import ExchangeRank, ExchangeResult, ExchangeStatus, run_ranks
from megatron_webrl.launch.preflight.local_checks import GROUP_SECONDS, MESSAGE_BYTES, CheckFailed
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.util import atomic_file
from megatron_webrl.util.text import first_line

CLOCK_SECONDS = 1.0  # largest difference between two clocks
GATHER_SECONDS = 300.0  # limit for all nodes to finish their local checks
LOCAL_STAGE, LINK_STAGE, ALL_STAGE = "local", "link", "all"  # local checks, links with neighbours, all-reduce


@dataclass
class NetworkCheckGroup:
    """This node's membership in the group of all nodes that are checked."""

    node_index: int  # of this node, from 0; node 0 hosts the store
    node_names: Sequence[str]  # of all nodes
    address: str  # of node 0
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
                atomic_file.write_text(file, str(store.port))
                return cls(number, names, address, store)
            deadline = time.monotonic() + seconds
            while not file.is_file():
                if time.monotonic() > deadline:
                    raise CheckFailed(f"{names[0]} did not start the network check within {seconds:.0f} s ({file})")
                time.sleep(0.1)
            port = int(file.read_text())
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
            return cls(number, names, address, store)
        except (DistNetworkError, DistStoreError) as error:
            raise CheckFailed(
                f"no connection to {names[0]} ({address}) within {seconds:.0f} s: {first_line(error)[:200]}"
            ) from error

    def gather(self, stage: str, value: str, seconds: float = GATHER_SECONDS) -> dict[int, str]:
        """The values of all nodes at a stage, as node 0 collects them; without a node that is silent for `seconds`.

        Raises CheckFailed if node 0 does not answer.
        """
        self.store.set(f"{stage}/{self.node_index}", value)
        if self.node_index == 0:
            deadline = time.monotonic() + seconds
            keys = [f"{stage}/{number}" for number in range(len(self.node_names))]
            while (silent := [key for key in keys if not self.store.check([key])]) and time.monotonic() < deadline:
                time.sleep(0.05)
            found = {number: self.store.get(key).decode() for number, key in enumerate(keys) if key not in silent}
            self.store.set(f"{stage}/all", json.dumps(found))
        try:
            self.store.wait([f"{stage}/all"], timedelta(seconds=seconds + GROUP_SECONDS))
            return {int(number): text for number, text in json.loads(self.store.get(f"{stage}/all")).items()}
        except (DistNetworkError, DistStoreError) as error:
            raise CheckFailed(
                f"{self.node_names[0]} did not collect the results of the {stage} stage: {first_line(error)[:200]}"
            ) from error

    def passed_members(self, stage: str, passed: bool, seconds: float = GATHER_SECONDS) -> list[int]:
        """Indices of the nodes that passed a stage; a node that is silent for `seconds` failed. Raises CheckFailed."""
        return [number for number, text in sorted(self.gather(stage, str(int(passed)), seconds).items()) if text == "1"]

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


@dataclass(frozen=True)
class NodeDevices:
    """The GPUs of this node, or processes without GPUs, which take part in exchanges."""

    node: str
    count: int
    cuda: bool
    nics: Sequence[str] = ()  # network card of each GPU; empty: NCCL chooses
    message_bytes: int = MESSAGE_BYTES

    def run(
        self, address: str, port: int, prefix: str, rank: int, size: int, seconds: float, *, pairs: bool = False
    ) -> list[ExchangeResult]:
        """Exchange as ranks `rank` and following of a group; with `pairs` each device is `rank` of its own group.

        Each device of `pairs` uses its own network card. A group uses all cards of the node: NCCL needs equal lists.
        """
        cards = list(dict.fromkeys(self.nics))
        return run_ranks(
            [
                ExchangeRank(
                    f"{self.node}.{'gpu' if self.cuda else 'cpu'}{index}",
                    address,
                    port,
                    f"{prefix}/{index}" if pairs else prefix,
                    rank if pairs else rank + index,
                    size,
                    seconds,
                    self.message_bytes,
                    index if self.cuda else None,
                    [self.nics[index]] if pairs and self.nics else cards,
                )
                for index in range(self.count)
            ]
        )

    def names(self, indices: Sequence[int]) -> str:
        """ "gpu 3", "gpu 0-7", or "process 1" without GPUs; empty if there is only one of those."""
        if self.count == 1 and not self.cuda:
            return ""
        return f"{'gpu' if self.cuda else 'process'} {format_cores(indices)}"


def check_devices(devices: NodeDevices, seconds: float = GROUP_SECONDS) -> float:
    """GiB/s of an all-reduce among the devices of this node. Raises CheckFailed that names those at fault."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = devices.run("127.0.0.1", store.port, "node", 0, devices.count, seconds)
    if faulty := blame_group({index: [result] for index, result in enumerate(results)}):
        reason = results[faulty[0]].message
        raise CheckFailed(f"{devices.names(faulty)}: all-reduce among the node's {devices.count} failed: {reason}")
    return min(result.gib_per_second for result in results)


def check_links(
    group: NetworkCheckGroup,
    members: Sequence[int],
    devices: NodeDevices,
    minimum: float,
    seconds: float = GROUP_SECONDS,
) -> LinkResults:
    """All-reduces of this node, one of `members`, with both neighbours; below `minimum` GiB/s they are slow.

    Returns the results of all members that report, for `link_failure` and `good_members`. Raises CheckFailed.
    """
    rank = members.index(group.node_index)
    results: dict[int, list[ExchangeResult]] = {}
    for number, pairs in enumerate(pair_rounds(len(members))):
        for pair in pairs:
            if rank not in pair:
                continue
            limit = seconds * (number + 1)  # the neighbour may have waited for a bad node in an earlier round
            prefix, place = f"link/{number}/{pair[0]}", pair.index(rank)
            row = devices.run(group.address, group.store.port, prefix, place, 2, limit, pairs=True)
            results[members[pair[1 - place]]] = [_judged(result, minimum) for result in row]
    return gather_links(group, members, results)


def gather_links(
    group: NetworkCheckGroup, members: Sequence[int], own: Mapping[int, Sequence[ExchangeResult]] | None
) -> LinkResults:
    """The link results of all members; `own`: of this node, None if it is no member. Raises CheckFailed."""
    text = "" if own is None else json.dumps({node: list(map(asdict, row)) for node, row in own.items()})
    return {
        node: {int(other): list(map(_read, row)) for other, row in json.loads(text).items()}
        for node, text in group.gather(LINK_STAGE, text).items()
        if text and node in members
    }


def good_members(members: Sequence[int], results: LinkResults) -> list[int]:
    """The members that reported their links and are not at fault."""
    faulty = blame_links(results)
    return [member for member in members if member in results and member not in faulty]


def link_failure(group: NetworkCheckGroup, results: LinkResults, devices: NodeDevices) -> str:
    """Why this node's links fail, with the GPUs at fault; empty if they do not."""
    faulty = blame_links(results).get(group.node_index)
    if not faulty:
        return ""
    reasons = []
    for other, row in results[group.node_index].items():
        found = next((row[gpu] for gpu in faulty if row[gpu].status is not ExchangeStatus.OK), None)
        if found is not None:
            slow = found.status is ExchangeStatus.SLOW
            reasons.append(f"{'' if slow else 'all-reduce '}with {group.node_names[other]}: {found.message}")
    names = devices.names(faulty)
    return f"{names}{': ' if names else ''}{'; '.join(reasons)}"


def check_all_reduce(
    group: NetworkCheckGroup, members: Sequence[int], devices: NodeDevices, seconds: float = 4 * GROUP_SECONDS
) -> float:
    """GiB/s of an all-reduce among all devices of `members`, of which this node is one; 0 if another node failed.

    Raises CheckFailed if it fails because of this node, or for no known reason.
    """
    rank, size = members.index(group.node_index) * devices.count, len(members) * devices.count
    row = devices.run(group.address, group.store.port, "all-reduce", rank, size, seconds)
    texts = group.gather(ALL_STAGE, json.dumps(list(map(asdict, row))))
    found = {node: list(map(_read, json.loads(texts[node]))) for node in members if texts.get(node)}
    if group.node_index in blame_group(found, complete=len(found) == len(members)):
        failed = [index for index, result in enumerate(row) if result.status is not ExchangeStatus.OK]
        others = ", ".join(group.node_names[member] for member in members if member != group.node_index)
        raise CheckFailed(f"{devices.names(failed)} all-reduce with {others} failed: {row[failed[0]].message}".strip())
    return min(result.gib_per_second for result in row)  # 0 after a failure of another node


def _judged(result: ExchangeResult, minimum: float) -> ExchangeResult:
    if result.status is ExchangeStatus.OK and result.gib_per_second < minimum:
        message = f"{result.gib_per_second:.2f} GiB/s, below {minimum:g}"
        return ExchangeResult(ExchangeStatus.SLOW, result.gib_per_second, message)
    return result


def _read(fields: dict[str, Any]) -> ExchangeResult:
    return ExchangeResult(ExchangeStatus(fields["status"]), fields["gib_per_second"], fields["message"])
