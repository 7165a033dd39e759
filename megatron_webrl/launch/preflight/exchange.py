"""An all-reduce between GPUs, each of them in a child process with a deadline.

A peer that hangs, and what NCCL does about it, can so neither hang nor abort the check itself: a child that gives no
result in time is killed, and every error becomes a result. Without GPUs the same children use gloo.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from megatron_webrl.util.child_process import describe_exit
from megatron_webrl.util.text import first_line

REPEATS = 3
START_SECONDS = 120.0  # limit for a child to start; the first one waits for the import of torch
KILL_MARGIN_SECONDS = 5.0  # a child that exceeds its limit by this is killed
EXIT_SECONDS = 5.0  # limit for a killed child to disappear: one in a call of a hung GPU's driver does not
INTERFACE_HINT = "with several network cards set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
# The children's watchdog must not end them or leave marks in the store that other children read: errors are results.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_PR_SET_NAME = 15
_LATE_FRACTION = 0.9  # an error after this share of the limit is a timeout


class ExchangeStatus(StrEnum):
    OK = "ok"
    SLOW = "slow"  # below the least speed
    ERROR = "error"  # the exchange failed before its limit
    TIMEOUT = "timeout"  # the child waited for the others until its limit
    LOCAL = "local"  # it failed before the exchange: the fault is here
    DIED = "died"  # the child ended without a result
    HUNG = "hung"  # the child did not even report that it waited too long, and was killed


@dataclass(frozen=True)
class ExchangeResult:
    """The result of one rank."""

    status: ExchangeStatus
    gib_per_second: float = 0.0  # sent, and received at the same time
    message: str = ""


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


def preload() -> None:
    """Let the fork server of the children import this module, and torch, once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])


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
        failed = [_receive(process, connection, start_deadline, "start") for process, connection in children]
        deadline = time.monotonic() + max(rank.seconds for rank in ranks) + KILL_MARGIN_SECONDS
        return [
            failure or _receive(process, connection, deadline, "finish")
            for failure, (process, connection) in zip(failed, children, strict=True)
        ]
    finally:
        for process, connection in children:
            _end_child(process, connection)


def measure_in_time(rank: ExchangeRank) -> ExchangeResult:
    """Run `measure`, and give up at the limit: a wait for a peer may last several limits of its operations."""
    results: list[ExchangeResult] = []
    ready = threading.Event()
    thread = threading.Thread(target=lambda: results.append(measure(rank, ready)), daemon=True)
    thread.start()
    thread.join(rank.seconds + KILL_MARGIN_SECONDS / 2)
    if results:
        return results[0]
    late = f"within {rank.seconds:.0f} s"
    if ready.is_set():
        return ExchangeResult(ExchangeStatus.TIMEOUT, message=f"no answer {late} ({INTERFACE_HINT})")
    return ExchangeResult(ExchangeStatus.LOCAL, message=f"{device_name(rank.gpu)} was not ready {late}")


def measure(rank: ExchangeRank, ready: threading.Event) -> ExchangeResult:
    """Join the group and all-reduce REPEATS times; returns the best speed. Sets `ready` before it joins."""
    begun = time.monotonic()
    try:
        values = torch.ones(rank.message_bytes // 4, device=_prepare_device(rank))
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built for CPUs
        return ExchangeResult(ExchangeStatus.LOCAL, message=f"{device_name(rank.gpu)}: {first_line(error)[:200]}")
    ready.set()
    try:
        limit = timedelta(seconds=rank.seconds)
        store = TCPStore(rank.address, rank.port, is_master=False, wait_for_workers=False, timeout=limit)
        group = _make_group(PrefixStore(rank.prefix, store), rank)
        best = min(_all_reduce(group, values, begun + rank.seconds) for _ in range(REPEATS))
    except RuntimeError as error:  # the base of DistError and of the errors of gloo and NCCL
        late = time.monotonic() - begun >= _LATE_FRACTION * rank.seconds
        status = ExchangeStatus.TIMEOUT if late else ExchangeStatus.ERROR
        return ExchangeResult(status, message=f"{first_line(error)[:200]} ({INTERFACE_HINT})")
    if not bool((values == rank.size).all()):
        return ExchangeResult(ExchangeStatus.ERROR, message="wrong sum")
    speed = 2 * (rank.size - 1) / rank.size * rank.message_bytes / best / 2**30
    return ExchangeResult(ExchangeStatus.OK, speed)


def device_name(gpu: int | None) -> str:
    """ "gpu 3", or "CPU"."""
    return "CPU" if gpu is None else f"gpu {gpu}"


def _prepare_device(rank: ExchangeRank) -> torch.device:
    if rank.gpu is None:
        return torch.device("cpu")
    # Read when CUDA and NCCL start, which a forked child has not done.
    os.environ.update(NCCL_ENVIRONMENT, TORCH_NCCL_NONBLOCKING_TIMEOUT=str(int(rank.seconds)))
    if rank.nics and "NCCL_IB_HCA" not in os.environ:
        os.environ["NCCL_IB_HCA"] = "=" + ",".join(rank.nics)
    torch.cuda.set_device(rank.gpu)
    return torch.device("cuda", rank.gpu)


def _make_group(store: Store, rank: ExchangeRank) -> Any:
    limit = timedelta(seconds=rank.seconds)
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
        connection.send(measure_in_time(rank))
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
        return ExchangeResult(ExchangeStatus.DIED, message=f"its process {ended}")
    return ExchangeResult(
        ExchangeStatus.HUNG, message=f"its process hung: it did not {doing} within {deadline - begun:.0f} s"
    )


def _end_child(process: ForkServerProcess, connection: Connection) -> None:
    process.kill()
    process.join(EXIT_SECONDS)
    connection.close()
