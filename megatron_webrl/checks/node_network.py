"""What the nodes of a job check together: clocks, links between neighbours, an all-reduce; and who is at fault.

The nodes meet at a store on the first one. Each GPU does an all-reduce with the same GPU of the next node, and with
that of the previous one; then all GPUs of all good nodes do one. Every node computes who is at fault from all results.

Each GPU is used by a child process with a deadline. A peer that hangs, and what NCCL does about it, can so neither hang
nor abort the check itself: a child that gives no result in time is killed, and every error becomes a result. Without
GPUs the same children use gloo.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, ProcessGroupGloo, Store, TCPStore

from megatron_webrl.checks.report import CheckFailed, CheckResult, failed, measured
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.util import atomic_file
from megatron_webrl.util.child_process import describe_exit
from megatron_webrl.util.text import first_line

REPEATS = 3
LINK_SECONDS = 30.0  # limit for forming a group of two nodes and exchanging data in it
GATHER_SECONDS = 300.0  # limit for all nodes to finish their local checks
CLOCK_SECONDS = 2.0  # largest difference between two clocks, and of the moments at which they are read
START_SECONDS = 120.0  # limit for a child to start; the first one waits for the import of torch
KILL_MARGIN_SECONDS = 5.0  # a child that exceeds its limit by this is killed
EXIT_SECONDS = 5.0  # limit for a killed child to disappear: one in a call of a hung GPU's driver does not
SOCKET_GIB_PER_SECOND = 3.0  # TCP with a connection for each GPU; a card of 100 Gbit/s reaches more than 10
SLOW_FRACTION = 0.5  # a GPU below this share of the median of its node is named
INTERFACE_HINT = "with several network cards set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
# The children's watchdog must not end them or leave marks in the store that other children read: errors are results.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
INFINIBAND_DEVICES = Path("/sys/class/infiniband")
_PR_SET_NAME = 15


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"  # an error, a wait for the others until the limit, or below the least speed
    LOCAL = "local"  # the fault is here: it failed before the exchange, or its process died
    HUNG = "hung"  # the child did not even report that it waited too long, and was killed


class ExchangeResult(NamedTuple):
    """The result of one rank of an all-reduce."""

    status: Status
    gib_per_second: float = 0.0  # sent, and received at the same time
    message: str = ""


LinkResults = Mapping[int, Mapping[int, Sequence[ExchangeResult]]]
"""By node, by neighbour, by GPU."""


# -- the child of a GPU ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExchangeRank:
    """One child: a rank of a group that meets at a store."""

    name: str  # shown by ps, such as "n2.gpu3"
    address: str  # of the store
    port: int
    prefix: str  # of the group's keys
    rank: int
    size: int
    seconds: float  # limit for forming the group and exchanging data
    message_bytes: int
    gpu: int | None = None  # index among the visible ones; None: CPU
    nics: Sequence[str] = ()  # network cards that it may use; empty: NCCL chooses

    @property
    def device_name(self) -> str:
        return "CPU" if self.gpu is None else f"gpu {self.gpu}"


def warm_up() -> None:
    """Start the fork server of the children; returns when torch is imported there."""
    process, connection = _start_child(None)
    if connection.poll(START_SECONDS):
        connection.recv()
    _end_child(process, connection)


def run_ranks(ranks: Sequence[ExchangeRank]) -> list[ExchangeResult]:
    """Run the children of these ranks at the same time; returns their results in order."""
    children = [_start_child(rank) for rank in ranks]
    try:
        start_deadline = time.monotonic() + START_SECONDS
        failures = [_receive(process, connection, start_deadline, "start") for process, connection in children]
        deadline = time.monotonic() + max(rank.seconds for rank in ranks) + KILL_MARGIN_SECONDS
        return [
            failure or _receive(process, connection, deadline, "finish")
            for failure, (process, connection) in zip(failures, children, strict=True)
        ]
    finally:
        for process, connection in children:
            _end_child(process, connection)


def _start_child(rank: ExchangeRank | None) -> tuple[ForkServerProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    connection, remote = context.Pipe(duplex=False)
    process = context.Process(target=_run_child, args=(rank, remote), daemon=True)
    process.start()
    remote.close()  # so that the end of the child ends the connection
    return process, connection


def _run_child(rank: ExchangeRank | None, connection: Connection) -> None:
    """The child: reports its start, then its result. Without a rank it only starts."""
    connection.send(None)
    if rank is not None:
        signal.alarm(int(rank.seconds + KILL_MARGIN_SECONDS) + 2)  # if nobody is left to kill it
        ctypes.CDLL(None).prctl(_PR_SET_NAME, rank.name.encode()[:15], 0, 0, 0)
        connection.send(_measure_in_time(rank))
    os._exit(0)  # the destructor of a failed NCCL group may hang


def _receive(process: ForkServerProcess, connection: Connection, deadline: float, doing: str) -> Any:
    """The next message of a child: None at its start, then its result; or a result that says why there is none."""
    begun = time.monotonic()
    try:
        if connection.poll(max(deadline - begun, 0)):
            return connection.recv()
    except (EOFError, ConnectionError):
        process.join(EXIT_SECONDS)
        ended = describe_exit(process.exitcode) if process.exitcode is not None else "ended"
        return ExchangeResult(Status.LOCAL, message=f"its process {ended}")
    return ExchangeResult(Status.HUNG, message=f"its process hung: it did not {doing} within {deadline - begun:.0f} s")


def _end_child(process: ForkServerProcess, connection: Connection) -> None:
    process.kill()
    process.join(EXIT_SECONDS)
    connection.close()


def _measure_in_time(rank: ExchangeRank) -> ExchangeResult:
    """Measure, and stop at the limit: a wait for a peer may last several limits of its operations."""
    results: list[ExchangeResult] = []
    ready = threading.Event()
    thread = threading.Thread(target=lambda: results.append(_measure(rank, ready)), daemon=True)
    thread.start()
    thread.join(rank.seconds + KILL_MARGIN_SECONDS / 2)
    if results:
        return results[0]
    if ready.is_set():
        return ExchangeResult(Status.FAILED, message=f"no answer within {rank.seconds:.0f} s ({INTERFACE_HINT})")
    return ExchangeResult(Status.LOCAL, message=f"{rank.device_name} was not ready within {rank.seconds:.0f} s")


def _measure(rank: ExchangeRank, ready: threading.Event) -> ExchangeResult:
    """Join the group and all-reduce REPEATS times; returns the best speed. Sets `ready` before it joins."""
    deadline, limit = time.monotonic() + rank.seconds, timedelta(seconds=rank.seconds)
    try:
        values = torch.ones(rank.message_bytes // 4, device=_prepare_device(rank))
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built for CPUs
        return ExchangeResult(Status.LOCAL, message=f"{rank.device_name}: {first_line(error)[:200]}")
    ready.set()
    try:
        store = TCPStore(rank.address, rank.port, is_master=False, wait_for_workers=False, timeout=limit)
        group = _make_group(PrefixStore(rank.prefix, store), rank, limit)
        best = min(_all_reduce(group, values, deadline) for _ in range(REPEATS))
    except RuntimeError as error:  # the base of DistError and of the errors of gloo and NCCL
        return ExchangeResult(Status.FAILED, message=f"{first_line(error)[:200]} ({INTERFACE_HINT})")
    if not bool((values == rank.size).all()):
        return ExchangeResult(Status.FAILED, message="wrong sum")
    return ExchangeResult(Status.OK, 2 * (rank.size - 1) / rank.size * rank.message_bytes / best / 2**30)


def _prepare_device(rank: ExchangeRank) -> torch.device:
    if rank.gpu is None:
        return torch.device("cpu")
    # Read when CUDA and NCCL start, which a forked child has not done.
    os.environ.update(NCCL_ENVIRONMENT, TORCH_NCCL_NONBLOCKING_TIMEOUT=str(int(rank.seconds)))
    if rank.nics and "NCCL_IB_HCA" not in os.environ:
        os.environ["NCCL_IB_HCA"] = "=" + ",".join(rank.nics)
    torch.cuda.set_device(rank.gpu)
    return torch.device("cuda", rank.gpu)


def _make_group(store: Store, rank: ExchangeRank, limit: timedelta) -> Any:
    if rank.gpu is None:
        return ProcessGroupGloo(store, rank.rank, rank.size, limit)
    options = torch.distributed.ProcessGroupNCCL.Options()  # a CPU build of torch has no ProcessGroupNCCL
    options._timeout = limit
    options.config.blocking = 0  # else the communicator's creation waits for a peer without a limit
    return torch.distributed.ProcessGroupNCCL(store, rank.rank, rank.size, options)


def _all_reduce(group: Any, values: torch.Tensor, deadline: float) -> float:
    """Seconds of one all-reduce of ones. Raises RuntimeError, at `deadline` too."""
    values.fill_(1.0)
    if values.is_cuda:
        filled = torch.cuda.Event()
        filled.record()
        _poll(filled.query, deadline)
    begun = time.perf_counter()
    work = group.allreduce([values])
    if values.is_cuda:  # gloo has no completion test, but its wait has a limit
        _poll(work.is_completed, deadline)
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return time.perf_counter() - begun


def _poll(is_done: Any, deadline: float) -> None:
    """Wait until `is_done()`; polls without a pause, as the speed is measured. Raises RuntimeError at `deadline`."""
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError("timed out")


# -- who is at fault --------------------------------------------------------------------------------------


def blame_links(results: LinkResults) -> dict[int, list[int]]:
    """GPUs at fault by node, from all-reduces of each node with its neighbours, GPU by GPU.

    A child that died, or hung while the other one did not, is at fault. Otherwise a GPU with one good link is not, so
    that the other end of its bad link is; if neither end has a good link, the later node is.
    """
    found: dict[int, list[int]] = {}
    for gpu in range(max((len(row) for rows in results.values() for row in rows.values()), default=0)):
        links = {  # between two nodes that both report, with the status at each end
            (first, second): (rows[second][gpu].status, results[second][first][gpu].status)
            for first, rows in sorted(results.items())
            for second in sorted(rows)
            if first < second and first in results.get(second, {})
        }
        for node in sorted(_blame_ends(links)):
            found.setdefault(node, []).append(gpu)
    return found


def _blame_ends(links: Mapping[tuple[int, int], tuple[Status, Status]]) -> set[int]:
    """The ends at fault of these links of one GPU of each node."""
    faulty: set[int] = set()
    for pair, statuses in links.items():
        for node, own, other in zip(pair, statuses, reversed(statuses), strict=True):
            if own == Status.LOCAL or (own == Status.HUNG and other != Status.HUNG):
                faulty.add(node)
    bad = [pair for pair, statuses in links.items() if set(statuses) != {Status.OK}]
    good = {node for pair in links if pair not in bad for node in pair}
    for pair in bad:
        suspects = [node for node in pair if node not in good]
        if not faulty.intersection(pair) and len(suspects) == 1:
            faulty.add(suspects[0])
    for pair in bad:
        if not faulty.intersection(pair) and not good.intersection(pair):
            faulty.add(max(pair))
    return faulty


def blame_group(results: Mapping[int, Sequence[ExchangeResult]], *, complete: bool = True) -> list[int]:
    """The members at fault, from the results of one all-reduce among all of them.

    If none stands out all that failed; none of them if the results are not complete, as silent members are at fault.
    """
    statuses = {member: {result.status for result in row} for member, row in results.items()}
    culprits = {Status.LOCAL}
    if set().union(*statuses.values()) != {Status.HUNG}:
        culprits.add(Status.HUNG)
    found = [member for member, row in statuses.items() if row & culprits]
    if found or not complete:
        return found
    return [member for member, row in statuses.items() if row != {Status.OK}]


def slow_gpus(results: Mapping[int, Sequence[ExchangeResult]]) -> dict[int, tuple[float, float]]:
    """GPUs of a node far below the median of its GPUs: best GiB/s with any neighbour, and the median."""
    rows = [[result.gib_per_second for result in row] for row in results.values()]
    best = [max(speeds) for speeds in zip(*rows, strict=True)]
    median = statistics.median(best) if best else 0.0
    return {gpu: (speed, median) for gpu, speed in enumerate(best) if speed < SLOW_FRACTION * median}


def socket_warning(results: Mapping[int, Sequence[ExchangeResult]], cards: Sequence[str]) -> str:
    """A warning if no link of a node is faster than sockets, although it has InfiniBand `cards`; empty otherwise."""
    best = max((result.gib_per_second for row in results.values() for result in row), default=0.0)
    if not cards or not 0 < best < SOCKET_GIB_PER_SECOND:
        return ""
    return (
        f"no link is faster than {best:.2f} GiB/s, although the node has {', '.join(cards)}: NCCL may use sockets "
        "(NCCL_DEBUG=INFO shows NET/Socket); look at NCCL_IB_DISABLE, NCCL_IB_HCA (cluster.nics) and the container"
    )


# -- the nodes ----------------------------------------------------------------------------------------------


@dataclass
class NodeGroup:
    """This node's membership in the group of all nodes that are checked."""

    index: int  # of this node, from 0; node 0 hosts the store
    names: Sequence[str]  # of all nodes
    address: str  # of node 0
    store: TCPStore

    @classmethod
    def join(
        cls, index: int, names: Sequence[str], address: str, file: Path, seconds: float = GATHER_SECONDS
    ) -> NodeGroup:
        """Join at node 0's `address`; node 0 writes the port to `file`. Raises CheckFailed after `seconds`."""
        limit, deadline = timedelta(seconds=seconds), time.monotonic() + seconds
        while index and not file.is_file():
            if time.monotonic() > deadline:
                raise CheckFailed(f"{names[0]} did not start the network check within {seconds:.0f} s ({file})")
            time.sleep(0.1)
        try:
            port = int(file.read_text()) if index else 0
            store = TCPStore(address, port, is_master=index == 0, wait_for_workers=False, timeout=limit)
        except (DistNetworkError, DistStoreError) as error:
            raise CheckFailed(
                f"no connection to {names[0]} ({address}) within {seconds:.0f} s: {first_line(error)[:200]}"
            ) from error
        if index == 0:
            atomic_file.write_text(file, str(store.port))
        return cls(index, names, address, store)

    def gather(self, stage: str, value: Any, seconds: float = GATHER_SECONDS) -> dict[int, Any]:
        """The values of all nodes at a stage, as node 0 collects them; without a node that is silent for `seconds`.

        Raises CheckFailed if node 0 does not answer.
        """
        self.store.set(f"{stage}/{self.index}", json.dumps(value))
        if self.index == 0:
            deadline = time.monotonic() + seconds
            keys = [f"{stage}/{number}" for number in range(len(self.names))]
            while (silent := [key for key in keys if not self.store.check([key])]) and time.monotonic() < deadline:
                time.sleep(0.05)
            found = {index: self.store.get(key).decode() for index, key in enumerate(keys) if key not in silent}
            self.store.set(f"{stage}/all", json.dumps(found))
        try:
            self.store.wait([f"{stage}/all"], timedelta(seconds=seconds + LINK_SECONDS))
            return {int(index): json.loads(text) for index, text in json.loads(self.store.get(f"{stage}/all")).items()}
        except (DistNetworkError, DistStoreError) as error:
            raise CheckFailed(
                f"{self.names[0]} did not collect the results of the {stage} stage: {first_line(error)[:200]}"
            ) from error

    def leave(self) -> None:
        """Report this node as done; node 0 waits until all nodes that joined are done, within a limit."""
        if self.index:
            self.store.set(f"done/{self.index}", "1")  # must be last: node 0 may exit after it
            return
        deadline = time.monotonic() + 4 * LINK_SECONDS
        keys = [f"done/{i}" for i in range(1, len(self.names)) if self.store.check([f"local/{i}"])]
        while keys and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


def clock_offset(group: NodeGroup) -> tuple[float, list[int]]:
    """Seconds by which node 0's clock is ahead of this node's, and the nodes whose clocks are right.

    All nodes leave the previous stage at the same moment, but for milliseconds, and compare their times.
    """
    times = group.gather("clock", time.time())
    good = [index for index, seconds in times.items() if abs(seconds - times[0]) <= CLOCK_SECONDS]
    return times[0] - times[group.index], good


def neighbour_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a circle of `count` members, in rounds that contain each member at most once."""
    if count <= 2:
        return [[(0, 1)]] if count == 2 else []
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for first in range(count):
        rounds[2 if first == count - 1 and count % 2 else first % 2].append((first, (first + 1) % count))
    return [pairs for pairs in rounds if pairs]


@dataclass(frozen=True)
class NodeDevices:
    """The GPUs of this node, or processes without GPUs, which take part in exchanges."""

    node: str
    count: int
    cuda: bool
    nics: Sequence[str] = ()  # network card of each GPU; empty: NCCL chooses
    message_bytes: int = 64 * 2**20  # of an all-reduce

    def run(
        self, address: str, port: int, prefix: str, rank: int, size: int, seconds: float, *, pairs: bool = False
    ) -> list[ExchangeResult]:
        """Exchange as ranks `rank` and following of a group; with `pairs` each device is `rank` of its own group.

        Each device of `pairs` uses its own network card. A group uses all cards of the node: NCCL needs equal lists.
        """
        cards, kind = list(dict.fromkeys(self.nics)), "gpu" if self.cuda else "cpu"
        ranks = []
        for index in range(self.count):
            own = (f"{prefix}/{index}", rank) if pairs else (prefix, rank + index)
            nics = [self.nics[index]] if pairs and self.nics else cards
            gpu = index if self.cuda else None
            name = f"{self.node}.{kind}{index}"
            ranks.append(ExchangeRank(name, address, port, *own, size, seconds, self.message_bytes, gpu, nics))
        return run_ranks(ranks)

    def names(self, indices: Sequence[int]) -> str:
        """ "gpu 3", "gpu 0-7", or "process 1" without GPUs; empty if there is only one of those."""
        if self.count == 1 and not self.cuda:
            return ""
        return f"{'gpu' if self.cuda else 'process'} {format_cores(indices)}"


def check_devices(devices: NodeDevices, seconds: float = LINK_SECONDS) -> float:
    """GiB/s of an all-reduce among the devices of this node. Raises CheckFailed that names those at fault."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = devices.run("127.0.0.1", store.port, "node", 0, devices.count, seconds)
    if faulty := blame_group({index: [result] for index, result in enumerate(results)}):
        reason = results[faulty[0]].message
        raise CheckFailed(f"{devices.names(faulty)}: all-reduce among the node's {devices.count} failed: {reason}")
    return min(result.gib_per_second for result in results)


def check_links(
    group: NodeGroup, members: Sequence[int], devices: NodeDevices, minimum: float, seconds: float = LINK_SECONDS
) -> LinkResults:
    """All-reduces of this node with both neighbours among `members`; below `minimum` GiB/s they fail.

    Returns the results of all members that report, for `link_failure` and `good_members`. A node that is no member only
    gathers them. Raises CheckFailed.
    """
    own: dict[int, list[ExchangeResult]] = {}
    for number, pairs in enumerate(neighbour_rounds(len(members))):
        for pair in ([members[end] for end in pair] for pair in pairs):
            if group.index not in pair:
                continue
            place = pair.index(group.index)
            limit = seconds * (number + 1)  # the neighbour may have waited for a bad node in an earlier round
            prefix = f"link/{number}/{pair[0]}"
            row = devices.run(group.address, group.store.port, prefix, place, 2, limit, pairs=True)
            own[pair[1 - place]] = [
                ExchangeResult(
                    Status.FAILED, each.gib_per_second, f"{each.gib_per_second:.2f} GiB/s, below {minimum:g}"
                )
                if each.status == Status.OK and each.gib_per_second < minimum
                else each
                for each in row
            ]
    return {
        node: {int(other): [ExchangeResult(*each) for each in row] for other, row in rows.items()}
        for node, rows in group.gather("link", own if group.index in members else None).items()
        if rows is not None and node in members
    }


def good_members(members: Sequence[int], results: LinkResults) -> list[int]:
    """The members that reported their links and are not at fault."""
    faulty = blame_links(results)
    return [member for member in members if member in results and member not in faulty]


def link_failure(group: NodeGroup, results: LinkResults, devices: NodeDevices) -> str:
    """Why this node's links fail, with the GPUs at fault; empty if they do not."""
    faulty = blame_links(results).get(group.index)
    if not faulty:
        return ""
    reasons = []
    for other, row in results[group.index].items():
        found = next((row[gpu] for gpu in faulty if row[gpu].status != Status.OK), None)
        if found is not None:
            reasons.append(f"all-reduce with {group.names[other]}: {found.message}")
    names = devices.names(faulty)
    return f"{names}{': ' if names else ''}{'; '.join(reasons)}"


def check_all_reduce(
    group: NodeGroup, members: Sequence[int], devices: NodeDevices, seconds: float = 4 * LINK_SECONDS
) -> float:
    """GiB/s of an all-reduce among all devices of `members`, of which this node is one; 0 if another node failed.

    Raises CheckFailed if it fails because of this node, or for no known reason.
    """
    rank, size = members.index(group.index) * devices.count, len(members) * devices.count
    row = devices.run(group.address, group.store.port, "all-reduce", rank, size, seconds)
    rows = group.gather("all-reduce", row)
    found = {node: [ExchangeResult(*each) for each in rows[node]] for node in members if rows.get(node)}
    if group.index in blame_group(found, complete=len(found) == len(members)):
        failures = [index for index, result in enumerate(row) if result.status != Status.OK]
        others = ", ".join(group.names[member] for member in members if member != group.index)
        reason = row[failures[0]].message
        raise CheckFailed(f"{devices.names(failures)} all-reduce with {others} failed: {reason}".strip())
    return min(result.gib_per_second for result in row)


# -- the check ------------------------------------------------------------------------------------------------


def check_network(
    devices: NodeDevices, nodes: Sequence[str], address: str, file: Path, passed: bool, minimum: float, seconds: float
) -> Iterator[CheckResult]:
    """Lines of a node: its devices among each other, its clock, links with neighbours, and an all-reduce of all.

    `address` of the first node, which writes the port of its store to `file`; `passed`: whether the node passed its own
    checks; else it takes part in none of the others. `minimum` GiB/s and limit in `seconds` of a link. Raises
    CheckFailed if the nodes do not meet.
    """
    if devices.count > 1 and (passed or not devices.cuda):
        try:  # before devices that do not reach each other can fail the checks with other nodes
            yield measured(devices.node, "all-reduce of the node", round(check_devices(devices), 3), "GiB/s")
        except CheckFailed as error:
            passed = False
            yield failed(devices.node, "all-reduce of the node", str(error))
    if len(nodes) < 2:
        return
    warm_up()
    group = NodeGroup.join(nodes.index(devices.node), nodes, address, file)
    try:
        yield from _check_members(group, devices, passed, minimum, seconds)
    finally:
        group.leave()


def _check_members(
    group: NodeGroup, devices: NodeDevices, passed: bool, minimum: float, seconds: float
) -> Iterator[CheckResult]:
    node = devices.node
    candidates = [index for index, good in group.gather("local", passed).items() if good]
    offset, on_time = clock_offset(group)
    if group.index in on_time:
        yield measured(node, "clock", round(offset, 6), "s")
    else:
        reason = f"differs by {offset:+.1f} s from the clock of {group.names[0]}; run NTP or chrony on both"
        yield failed(node, "clock", reason)
    members = [index for index in candidates if index in on_time]
    results = check_links(group, members, devices, minimum, seconds)
    if group.index in members:
        yield from _link_lines(group, results[group.index], devices)
        if failure := link_failure(group, results, devices):
            yield failed(node, "link", failure)
    members = good_members(members, results)
    if group.index not in members or len(members) < 2:
        group.gather("all-reduce", None)
        return
    try:
        if speed := check_all_reduce(group, members, devices):
            yield measured(node, "all-reduce of all", round(speed, 3), "GiB/s")
    except CheckFailed as error:
        yield failed(node, "all-reduce", str(error))


def _link_lines(
    group: NodeGroup, results: Mapping[int, Sequence[ExchangeResult]], devices: NodeDevices
) -> Iterator[CheckResult]:
    """The slowest device of each link; the first line has the warnings of the node."""
    warnings = []
    for index, (speed, median) in slow_gpus(results).items():
        card = f" ({devices.nics[index]})" if devices.nics else ""
        warnings.append(
            f"{devices.names([index])}{card} is slow: {speed:.2f} GiB/s with its neighbours, but the median of the "
            f"node is {median:.2f}"
        )
    cards = sorted(path.name for path in INFINIBAND_DEVICES.glob("*")) if devices.cuda else []
    warnings += filter(None, [socket_warning(results, cards)])
    for other, row in results.items():
        if speed := min(result.gib_per_second for result in row):
            name, note = f"link {group.names[other]}", "; ".join(warnings)
            yield CheckResult(devices.node, name, "passed", round(speed, 3), None, "GiB/s", note)
            warnings = []
