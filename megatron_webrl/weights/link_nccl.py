"""NCCL process group of a link: one whose failure and creation affect nothing but the link.

The attributes and variables are those of torch 2.13.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_webrl.weights.link_channels import GRACE_SECONDS, poll_until

MAX_CTAS = 4  # of a communicator: a rank of a large trainer has ten of them, each with memory for all of its blocks
CONSTRUCTOR_VARIABLES = {
    # No watchdog thread: it would end the process when a peer dies. Completion tests find errors without it.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def make_nccl_group(
    store: dist.Store, rank: int, size: int, senders: int, timeout_seconds: float, device: torch.device
) -> Any:
    """Form the group and its communicator; returns once each sender is connected to each receiver. Raises RuntimeError.

    The first `senders` ranks send, the others receive.
    Waits at most `timeout_seconds` if TORCH_NCCL_NONBLOCKING_TIMEOUT does not exceed them: torch reads that variable
    once in a process, before the first collective, so that the launcher and the engine set it.
    """
    torch.cuda.set_device(device)  # of this thread
    deadline = time.monotonic() + timeout_seconds
    options = dist.ProcessGroupNCCL.Options()
    set_link_options(options, timeout_seconds)
    with environment_variables(CONSTRUCTOR_VARIABLES):
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    try:
        # One communicator for the whole link: pairs would create theirs later, and a dead peer would block all links.
        group.eager_connect_single_device(device)
        # The communicator connects in the background; its first operation waits for that.
        for start in (
            lambda: group.allreduce([torch.zeros(1, device=device)]),
            lambda: connect_pairs(group, dist.ProcessGroup(store, rank, size), senders, device),
        ):
            work = start()
            if not poll_until(work.is_completed, max(deadline - time.monotonic(), 0.0)):
                raise RuntimeError(f"NCCL did not connect all {size} ranks within {timeout_seconds:g} s")
            work.wait()  # raises the error of a failed operation
    except BaseException:
        group.abort()
        raise
    return group


def connect_pairs(group: Any, wrapper: Any, senders: int, device: torch.device) -> Any:
    """Start to exchange one element between each sender and receiver; returns the work.

    NCCL connects two ranks at their first message, and torch's send then blocks until the other rank takes part: in a
    transfer a stopped engine would delay all others. `wrapper`: a new ProcessGroup of this rank; only that class has
    torch's coalescing, which lets all pairs connect at once.
    """
    wrapper._register_backend(device, dist.ProcessGroup.BackendType.NCCL, group)
    wrapper._start_coalescing(device)
    if wrapper.rank() < senders:
        for receiver in range(senders, wrapper.size()):
            group.send([torch.zeros(1, device=device)], receiver, 0)
    else:
        for sender in range(senders):
            group.recv([torch.zeros(1, device=device)], sender, 0)
    return wrapper._end_coalescing(device)


def set_link_options(options: Any, timeout_seconds: float) -> None:
    """Set the ProcessGroupNCCL.Options of a link: its timeout, non-blocking creation, few thread blocks."""
    options._timeout = timedelta(seconds=timeout_seconds + GRACE_SECONDS)  # NCCL counts from the enqueue
    options.config.blocking = 0  # else ncclCommInitRank waits for a dead peer for ever
    options.config.max_ctas = MAX_CTAS


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Context with these environment variables; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
