"""A control service in a thread, for tests of its clients."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_webrl.control.client import ControlClient, TicketClaim
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.control.journal import restore
from megatron_webrl.control.server import serve
from megatron_webrl.control.state import TICKETS
from megatron_webrl.types import TaskReference
from tests.waiting import until


def start(folder: Path, heartbeat_timeout_seconds: float = 60.0) -> tuple[Path, threading.Thread]:
    """Start a service; returns its address file and its thread."""
    path = folder / "control.json"
    path.unlink(missing_ok=True)
    arguments = ("127.0.0.1", 0, "ring", path, folder / "control.journal", heartbeat_timeout_seconds)
    thread = threading.Thread(target=serve, args=arguments, daemon=True)
    thread.start()
    until(path.is_file, "the control service")
    return path, thread


@contextmanager
def control_service(folder: Path, heartbeat_timeout_seconds: float = 60.0) -> Iterator[Path]:
    """Serve within the context; yields the address file."""
    path, thread = start(folder, heartbeat_timeout_seconds)
    yield path
    with suppress(JobFailed):  # it has exited after the end of the job
        if thread.is_alive():
            last = ControlClient(path, "test", connect_seconds=10.0)
            last.end_job("finished")
            last.shutdown()
    thread.join(60)


def connect(address: Path, role: str) -> ControlClient:
    """Connect as a role."""
    return ControlClient(address, role)


def tickets(numbers: Iterable[int]) -> dict[int, TaskReference]:
    """Tickets with a task each, as a trainer issues them."""
    return {number: TaskReference(f"task {number}", "click-test", number, 3) for number in numbers}


def claim_tickets(control: ControlClient, count: int, wait_seconds: float = 0.0) -> list[TicketClaim]:
    """Claim up to `count` tickets as a worker, and wait up to `wait_seconds` for one."""
    claims = control.claim(TICKETS, control.role, count, wait_seconds=wait_seconds)
    return list(map(TicketClaim.from_json, claims))


def facts(address: Path) -> set[str]:
    """Keys of all facts of the job."""
    return set(restore(address.with_name("control.journal")).facts)
