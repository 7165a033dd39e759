"""The two processes of a checked link: a trainer rank that sends, and an engine rank that receives."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megatron_webrl.util import child_process
from megatron_webrl.weights import transport
from megatron_webrl.weights.slices import Slice, TransferMessage

PARAMETER = "weights"
GROUP_SECONDS = 60.0
TRANSFERS = 3  # the fastest counts


@dataclass(frozen=True)
class LinkCase:
    """A link of two ranks."""

    port: int  # of the store
    name: str
    sender: str  # device
    receiver: str
    elements: int  # of a transfer, float32
    message_elements: int
    timeout_seconds: float  # of each wait in a transfer
    join_seconds: float = GROUP_SECONDS
    signal_sender: int = 0  # signal that the sender sends itself after half of the messages
    signal_receiver: int = 0
    observe_seconds: float = 0.0  # after a failed transfer, before the sender computes again

    @property
    def backend(self) -> str:
        return "nccl" if self.sender.startswith("cuda") else "gloo"

    def messages(self) -> list[TransferMessage]:
        """The parameter in messages of at most `message_elements`."""
        starts = range(0, self.elements, self.message_elements)
        sizes = [min(self.message_elements, self.elements - start) for start in starts]
        return [
            TransferMessage(0, 0, (Slice("weights", (size,), PARAMETER, (start,), PARAMETER, (start,)),), size)
            for start, size in zip(starts, sizes, strict=True)
        ]

    def join(self, rank: int) -> transport.TransferLink:
        """Join the link. Raises TransferError."""
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=GROUP_SECONDS))
        return transport.join_link(store, self.name, rank, 2, self.join_seconds, self.backend)  # type: ignore[arg-type]


def _begin(case: LinkCase, device: str) -> torch.device:
    child_process.die_with_parent()  # the fork server, which ends with the process of the section
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        # Read once, at the first collective: the limit of the creation of a link.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(case.join_seconds))))
        torch.cuda.set_device(device)
    return torch.device(device)


def send(connection: Connection, case: LinkCase) -> None:
    """Body of the sender: sends (seconds, error, whether it computes afterwards).

    Seconds of the fastest transfer; with an error those since the link was joined, or since the attempt to join it.
    """
    device = _begin(case, case.sender)
    dist.init_process_group(
        case.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=GROUP_SECONDS)
    )
    values = torch.arange(case.elements, dtype=torch.float32, device=device)
    half, asked = len(case.messages()) // 2, 0

    def source(name: str) -> torch.Tensor:
        nonlocal asked
        asked += 1
        if case.signal_sender and asked > half:
            os.kill(os.getpid(), case.signal_sender)
        return values

    fastest, error = float("inf"), None
    started = time.monotonic()
    try:
        link = case.join(0)
        started = time.monotonic()
        outgoing = [transport.OutgoingMessages(link, case.messages(), {0: 1})]
        for number in range(1, TRANSFERS + 1):
            began = time.perf_counter()
            staging = 8 * 4 * case.message_elements
            found = transport.send(outgoing, source, torch.float32, staging, number, case.timeout_seconds, verify=False)
            fastest = min(fastest, time.perf_counter() - began)
            if error := found[case.name]:
                break
        link.close()
    except transport.TransferError as failure:
        error = str(failure)
    failed_after = time.monotonic() - started
    time.sleep(case.observe_seconds if error else 0.0)
    total = torch.ones(8, device=device)
    dist.all_reduce(total)
    connection.send((failed_after if error else fastest, error, bool((total == 1).all())))


def receive(connection: Connection, case: LinkCase) -> None:
    """Body of the receiver: sends (seconds since the link was joined, error, whether all values arrived)."""
    device = _begin(case, case.receiver)
    target = _Target(case, device)
    started = time.monotonic()
    try:
        link = case.join(1)
        started = time.monotonic()
        for number in range(1, TRANSFERS + 1):
            target.tensors.fill_(-1.0)
            staging = 8 * 4 * case.message_elements
            transport.receive(link, case.messages(), target, torch.float32, staging, number, case.timeout_seconds)
        link.close()
    except transport.TransferError as failure:
        connection.send((time.monotonic() - started, str(failure), False))
        return
    expected = torch.arange(case.elements, dtype=torch.float32, device=device)
    connection.send((time.monotonic() - started, None, torch.equal(target.tensors, expected)))


class _Target:
    """A WeightTarget of one parameter, which may send a signal to its process."""

    def __init__(self, case: LinkCase, device: torch.device) -> None:
        self.case, self.written, self.half = case, 0, len(case.messages()) // 2
        self.tensors = torch.empty(case.elements, device=device)

    def tensor(self, parameter: str) -> torch.Tensor:
        return self.tensors

    def mark_written(self, parameter: str, elements: int) -> None:
        self.written += 1
        if self.case.signal_receiver and self.written > self.half:
            os.kill(os.getpid(), self.case.signal_receiver)
