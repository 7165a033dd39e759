"""All-reduces between GPUs: those of a machine, and those of the nodes of a job; and which node is at fault.

The nodes meet at a store on the first one. All GPUs of a node do an all-reduce with those of ROUNDS others in turn;
then all GPUs of all good nodes do one. Every node computes who is at fault from the results of all.

Each GPU is used by a process with a limit, so that a peer that hangs, and what NCCL does about it, can neither hang nor
abort the check. Without GPUs the same processes use gloo.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from megatron_webrl.checks.processes import run_processes
from megatron_webrl.checks.report import (
    CheckFailed,
    CheckResult,
    GpuCheckRequest,
    at_least,
    at_most,
    failed,
    skipped,
)
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.util import atomic_file
from megatron_webrl.util.text import first_line

REPEATS = 3  # the fastest counts
ROUNDS = 3  # nodes that each node is paired with
LINK_SECONDS = 30.0  # limit for forming a group of two nodes and exchanging data in it
GATHER_SECONDS = 300.0  # limit for all nodes to finish their local checks
CLOCK_SECONDS = 2.0  # largest difference between two clocks, and of the moments at which they are read
START_SECONDS = 120.0  # limit of the fork server, which imports torch
KILL_MARGIN_SECONDS = 5.0  # a process that exceeds its limit by this is killed
SLOW_FRACTION = 0.5  # of the median of all pairs of a machine, or of the GPUs of a node
INTERFACE_HINT = "with several network cards set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
# The watchdog must not end the process or leave marks in the store that others read: errors are results.
NCCL_ENVIRONMENT = {
    **{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"},
    **{"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
}


@dataclass(frozen=True)
class Rank:
    """One process: a rank of a group that meets at a store."""

    port: int  # of the store
    prefix: str  # of the group's keys
    rank: int
    size: int
    gpu: int | None = None  # index among the visible ones; None: CPU
    address: str = "127.0.0.1"  # of the store
    nics: Sequence[str] = ()  # network cards that it may use; empty: NCCL chooses
    seconds: float = LINK_SECONDS  # limit for forming the group and exchanging data
    message_bytes: int = 64 * 2**20


class Link(NamedTuple):
    """What one rank saw of an all-reduce."""

    gib_per_second: float = 0.0  # sent, and received at the same time
    error: str = ""  # an error, no answer until the limit, or below the least speed
    local: bool = False  # whether the fault is here: its process died or hung, or has no device


def warm_up() -> None:
    """Start the fork server of the ranks; returns when torch is imported there."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    run_processes(f"{__name__}:do_nothing", [None], START_SECONDS)


def do_nothing(argument: None) -> Iterator[None]:
    """No result."""
    return iter(())


def all_reduce(ranks: Sequence[Rank]) -> list[Link]:
    """Run these ranks at the same time; returns their results in order."""
    seconds = max(rank.seconds for rank in ranks) + KILL_MARGIN_SECONDS
    outcomes = run_processes(f"{__name__}:measure", ranks, seconds, NCCL_ENVIRONMENT)
    return [each.results[0] if each.results else Link(error=each.error, local=True) for each in outcomes]


def measure(rank: Rank) -> Iterator[Link]:
    """The process of a rank. Stops at the limit: a wait for a peer may last several limits of its operations."""
    results: list[Link] = []
    thread = threading.Thread(target=lambda: results.append(_measure(rank)), daemon=True)
    thread.start()
    thread.join(rank.seconds)
    yield results[0] if results else Link(error=f"no answer within {rank.seconds:.0f} s ({INTERFACE_HINT})")


def _measure(rank: Rank) -> Link:
    """Join the group; returns the best speed of REPEATS all-reduces."""
    deadline, limit = time.monotonic() + rank.seconds, timedelta(seconds=rank.seconds)
    try:
        if rank.gpu is not None:  # these are read when CUDA and NCCL start
            os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(int(rank.seconds))
            if rank.nics:
                os.environ.setdefault("NCCL_IB_HCA", f"={','.join(rank.nics)}")
            torch.cuda.set_device(rank.gpu)
        device = "cpu" if rank.gpu is None else f"cuda:{rank.gpu}"
        values = torch.ones(rank.message_bytes // 4, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built for CPUs
        return Link(error=f"no memory on the device: {first_line(error)[:200]}", local=True)
    try:
        store: Any = TCPStore(rank.address, rank.port, is_master=False, wait_for_workers=False, timeout=limit)
        store = PrefixStore(rank.prefix, store)
        if rank.gpu is None:
            group: Any = ProcessGroupGloo(store, rank.rank, rank.size, limit)
        else:
            options = torch.distributed.ProcessGroupNCCL.Options()  # a CPU build of torch has no ProcessGroupNCCL
            options._timeout = limit
            options.config.blocking = 0  # else the communicator's creation waits for a peer without a limit
            group = torch.distributed.ProcessGroupNCCL(store, rank.rank, rank.size, options)
        best = min(_seconds(group, values, deadline) for _ in range(REPEATS))
    except RuntimeError as error:  # the base of DistError and of the errors of gloo and NCCL
        return Link(error=f"{first_line(error)[:200]} ({INTERFACE_HINT})")
    if not bool((values == rank.size).all()):
        return Link(error="wrong sum")
    return Link(2 * (rank.size - 1) / rank.size * rank.message_bytes / best / 2**30)


def _seconds(group: Any, values: torch.Tensor, deadline: float) -> float:
    """Seconds of one all-reduce of ones. Raises RuntimeError, at `deadline` too."""
    values.fill_(1.0)
    if values.is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work = group.allreduce([values])
    while values.is_cuda and not work.is_completed():  # gloo has no completion test, but its wait has a limit
        if time.monotonic() > deadline:
            raise RuntimeError("timed out")
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return time.perf_counter() - begun


# -- GPUs of a machine ----------------------------------------------------------------------------------------------


def check_links(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Section "links": an all-reduce of every pair of GPUs, or of two processes; a slow pair fails."""
    cuda = request.platform == "cuda"
    count = torch.cuda.device_count() if cuda else 2
    if count < 2:
        yield skipped("links", "pairs of GPUs", "this machine shows one GPU")
        return
    warm_up()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size, speeds = 2**30 if cuda else 2**24, dict[str, float]()
    for pair in combinations(range(count), 2):
        name = f"pair {pair[0]}-{pair[1]}"
        ranks = [Rank(store.port, name, i, 2, n if cuda else None, message_bytes=size) for i, n in enumerate(pair)]
        links = all_reduce(ranks)
        if bad := next((link.error for link in links if link.error), ""):
            yield failed("links", name, bad)
            continue
        speeds[name] = min(link.gib_per_second for link in links)
    least = max(request.min_link_gib_per_second, SLOW_FRACTION * statistics.median(speeds.values() or [0.0]))
    for name, speed in speeds.items():
        note = "slow: --min-link-gib-per-second, or half of the median, is the limit" if speed < least else ""
        yield at_least("links", name, speed, least, "GiB/s", note)


# -- nodes of a job -------------------------------------------------------------------------------------------------


def blame(links: Mapping[int, Mapping[int, Link]]) -> set[int]:
    """Nodes at fault, from the links of each node: with a local fault, or without a link that both ends call good.

    If no link is good, the first node without a local fault passes.
    """
    fit = [node for node, row in sorted(links.items()) if not any(link.local for link in row.values())]
    good = [
        node
        for node in fit
        if any(not link.error and not links[other][node].error for other, link in links[node].items() if other in links)
    ]
    return set(links).difference(good or fit[:1])


def peer(number: int, count: int, round_number: int) -> int | None:
    """With whom a member of `count` is paired in a round from 1 on; None: with nobody."""
    other = (round_number - number) % count
    return None if other == number else other


def slow_link(links: Mapping[int, Mapping[int, Link]], node: int) -> str:
    """A warning if the best link of a node is far slower than those of the other nodes; else empty."""
    best = {index: max(link.gib_per_second for link in row.values()) for index, row in links.items() if row}
    speed, median = best.get(node, 0.0), statistics.median(best.values() or [0.0])
    if not 0 < speed < SLOW_FRACTION * median:
        return ""
    return f"slow: its best link has {speed:.2f} GiB/s, the median of the nodes is {median:.2f} (NCCL_DEBUG=INFO)"


@dataclass
class NodeNetwork:
    """A node of a job, and what its GPUs, or processes in their place, exchange with the other nodes."""

    name: str
    nodes: Sequence[str]  # of the job; the first hosts the store
    address: str  # of the first node
    file: Path  # to which the first node writes the port of its store
    gpus: int = 0
    nics: Sequence[str] = ()  # network cards of the GPUs; empty: NCCL chooses
    min_gib_per_second: float = 0.0  # least speed of a link
    processes: int = 1  # without GPUs
    message_bytes: int = 64 * 2**20

    def check(self, passed: bool) -> Iterator[CheckResult]:
        """Lines of the clock, the links with other nodes, and an all-reduce of all.

        `passed`: whether the node passed its own checks; else it has no links.
        """
        self.index, self.count = self.nodes.index(self.name), self.gpus or self.processes
        self.heard = set(range(len(self.nodes)))  # nodes that node 0 waits for
        try:
            warm_up()
            self.store = self._join()
            yield from self._check_nodes(passed)
            self._leave()
        except RuntimeError as error:  # also of the store
            yield failed(self.name, "network", f"{self.nodes[0]} ({self.address}): {first_line(error)[:300]}")

    def _check_nodes(self, passed: bool) -> Iterator[CheckResult]:
        good = [node for node, fit in self._gather("local", passed).items() if fit]
        # All nodes leave the previous stage at the same moment, but for milliseconds.
        times = self._gather("clock", time.time())
        on_time = [node for node in times if abs(times[node] - times[0]) <= CLOCK_SECONDS]
        offset = round(times[0] - times[self.index], 6)
        reason = f"differs by {offset:+.1f} s from the clock of {self.nodes[0]}; run NTP or chrony on both"
        note = "" if self.index in on_time else reason
        yield at_most(self.name, "clock", abs(offset), CLOCK_SECONDS, "s", note)
        members = [node for node in good if node in on_time]
        links = self._links(members)
        faulty, note = blame(links), slow_link(links, self.index)
        for other, link in links.get(self.index, {}).items():
            if self.index in faulty or not link.error:
                yield self._line(f"link {self.nodes[other]}", link, note)
                note = ""
        members = [node for node in members if node in links and node not in faulty]
        own = None
        if self.index in members and len(members) > 1:
            own = self._all_reduce("all", members.index(self.index), len(members), ROUNDS + 1)
        rows = {node: Link(*row) for node, row in self._gather("all-reduce", own).items() if row}
        bad = [node for node, link in rows.items() if link.local] or [n for n, link in rows.items() if link.error]
        if own and (self.index in bad or not bad):
            yield self._line("all-reduce of all", own)

    def _links(self, members: Sequence[int]) -> dict[int, dict[int, Link]]:
        """All-reduces in pairs of `members`; the links of all members that report, by the other node."""
        own: dict[int, Link] = {}
        for number in range(1, 1 + min(ROUNDS, len(members)) if self.index in members else 1):
            place = members.index(self.index)
            if (other := peer(place, len(members), number)) is None:
                continue
            # The other one may have waited for a bad node in an earlier round: a limit for each.
            link = self._all_reduce(f"{number}/{min(place, other)}", int(place > other), 2, number)
            if not link.error and link.gib_per_second < self.min_gib_per_second:
                link = link._replace(error=f"{link.gib_per_second:.2f} GiB/s, below {self.min_gib_per_second:g}")
            own[members[other]] = link
        return {
            node: {int(other): Link(*link) for other, link in row.items()}
            for node, row in self._gather("link", own).items()
            if node in members
        }

    def _all_reduce(self, prefix: str, node: int, nodes: int, limits: int) -> Link:
        """All-reduce of all GPUs of `nodes` nodes, of which this is number `node`; the worst of this one's GPUs."""
        ranks = [
            Rank(
                self.store.port, prefix, node * self.count + number, nodes * self.count, number if self.gpus else None,
                self.address, tuple(dict.fromkeys(self.nics)), limits * LINK_SECONDS, self.message_bytes,
            )
            for number in range(self.count)
        ]  # fmt: skip
        links = all_reduce(ranks)
        bad = [n for n, link in enumerate(links) if link.local] or [n for n, link in enumerate(links) if link.error]
        if bad:
            names = f"{'gpu' if self.gpus else 'process'} {format_cores(bad)}"
            return links[bad[0]]._replace(error=f"{names}: {links[bad[0]].error}")
        return min(links)

    def _line(self, name: str, link: Link, note: str = "") -> CheckResult:
        if link.error:
            return failed(self.name, name, link.error)
        return CheckResult(self.name, name, "passed", round(link.gib_per_second, 3), None, "GiB/s", note)

    def _join(self) -> TCPStore:
        """The store of the first node, which writes its port to `file`. Raises RuntimeError after GATHER_SECONDS."""
        deadline = time.monotonic() + GATHER_SECONDS
        while self.index and not self.file.is_file():
            if time.monotonic() > deadline:
                raise CheckFailed(f"did not start the network check within {GATHER_SECONDS:.0f} s ({self.file})")
            time.sleep(0.1)
        port, limit = int(self.file.read_text()) if self.index else 0, timedelta(seconds=GATHER_SECONDS)
        store = TCPStore(self.address, port, is_master=not self.index, wait_for_workers=False, timeout=limit)
        if not self.index:
            atomic_file.write_text(self.file, str(store.port))
        return store

    def _gather(self, stage: str, value: Any) -> dict[int, Any]:
        """The values of all nodes at a stage, as node 0 collects them; without nodes silent for GATHER_SECONDS.

        No later stage waits for such a node.
        """
        self.store.set(f"{stage}/{self.index}", json.dumps(value))
        if not self.index:
            keys = [f"{stage}/{node}" for node in range(len(self.nodes))]
            self._wait_for([keys[node] for node in self.heard], GATHER_SECONDS)
            found = {n: json.loads(self.store.get(key)) for n, key in enumerate(keys) if self.store.check([key])}
            self.heard.intersection_update(found)
            self.store.set(f"{stage}/all", json.dumps(found))
        self.store.wait([f"{stage}/all"], timedelta(seconds=GATHER_SECONDS + LINK_SECONDS))
        values = {int(node): content for node, content in json.loads(self.store.get(f"{stage}/all")).items()}
        if self.index not in values:
            raise CheckFailed(f"did not wait for this node, which was silent for {GATHER_SECONDS:.0f} s")
        return values

    def _leave(self) -> None:
        """Report this node as done; node 0 waits until all nodes that joined are done, within a limit."""
        self.store.set(f"done/{self.index}", "1")  # must be last: node 0 may exit after it
        if not self.index:
            joined = [node for node in range(len(self.nodes)) if self.store.check([f"local/{node}"])]
            self._wait_for([f"done/{node}" for node in joined], LINK_SECONDS)

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
