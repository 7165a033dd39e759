"""Read-only queries of the control plane of a running job.

A helper process (this module as a program) makes them: torch waits without end for a stopped control plane's answer.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.system.child_process import die_with_parent
from megatron_webrl.system.text import first_line

if TYPE_CHECKING:
    from megatron_webrl.control.control_plane import ControlClient

CONNECT_SECONDS = 3.0
QUERY_SECONDS = 10.0
START_SECONDS = 60.0  # for the helper process, which imports torch
RECENT_TICKETS = 2000  # newest slots of the ticket counter that are searched for groups in progress


@dataclass(frozen=True)
class ControlAddress:
    """Address of a control plane, from control.json."""

    host: str
    port: int
    job_id: str  # empty: unknown

    @classmethod
    def read(cls, path: Path) -> ControlAddress | None:
        """Read control.json; None without a valid file."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            return cls(fields["host"], int(fields["port"]), fields.get("job_id", ""))
        return None

    @property
    def is_loopback(self) -> bool:
        """Whether the address can be reached only from the machine itself."""
        return self.host.startswith("127.") or self.host in ("localhost", "::1")


@dataclass(frozen=True)
class TicketCounts:
    claimed: int  # slots
    limit: int
    in_progress: int  # claimed and not closed


@dataclass(frozen=True)
class ControlStatus:
    outcome: str | None = None  # None while the job runs
    job_id: str = ""
    accepts_tickets: bool = False  # whether workers may claim tickets
    stop_requested: bool = False
    tickets: TicketCounts | None = None
    status_lines: dict[str, str] = field(default_factory=dict)  # by role
    heartbeat_ages: dict[str, float | None] = field(default_factory=dict)  # seconds by role, node clock; None: unknown
    instance_counts: dict[str, int] = field(default_factory=dict)  # by role

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ControlStatus:
        tickets = content["tickets"]
        return cls(**{**content, "tickets": None if tickets is None else TicketCounts(**tickets)})


class ControlProbe:
    """Queries control planes with a time limit. A context manager, which ends the helper process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ControlProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def query(
        self, address: ControlAddress, roles: Sequence[str], seconds: float = QUERY_SECONDS
    ) -> ControlStatus | str:
        """The status of the job and of these roles, or the reason why it is unknown after `seconds`."""
        if reason := _connection_error(address):
            return reason
        process = self._helper()
        if process is None:
            return "the helper process for queries did not start"
        query = {"host": address.host, "port": address.port, "job_id": address.job_id, "roles": list(roles)}
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(query).encode() + b"\n")
            process.stdin.flush()
        line = _line(process, seconds)
        if line is None:
            self.close()
            return f"{address.host}:{address.port} did not answer within {seconds:.0f} s"
        content = json.loads(line)
        return content if isinstance(content, str) else ControlStatus.from_json(content)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _helper(self) -> subprocess.Popen[bytes] | None:
        """The helper process, started if needed; None if it does not start."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_webrl.status.control_probe", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if _line(self._process, START_SECONDS) is None:
                self.close()
        return self._process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line that a process writes; None after `seconds` or at the end of its output."""
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([process.stdout], [], [], remaining)[0]:
            return None
        data = os.read(process.stdout.fileno(), 2**20)
        if not data:
            return None
        line += data
    return line


def _connection_error(address: ControlAddress) -> str | None:
    """Why a TCP connection fails; does not import torch."""
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"{address.host}:{address.port} does not respond ({error.strerror or error})"
    return None


def _query(address: ControlAddress, roles: Sequence[str]) -> ControlStatus | str:
    from megatron_webrl.control.control_plane import ControlClient, JobFailed

    try:
        control = ControlClient(
            address.host, address.port, "status", heartbeat_timeout_seconds=0.0, connect_seconds=CONNECT_SECONDS
        )
        job_id = _text(control, "job/id") or ""
        if address.job_id and job_id != address.job_id:
            return f"another job ({job_id or 'without an id'}) answers at {address.host}:{address.port}"
        return _read_status(control, job_id, roles)
    except (JobFailed, RuntimeError) as error:  # errors of a torch store are RuntimeErrors
        return first_line(error)


def _read_status(control: ControlClient, job_id: str, roles: Sequence[str]) -> ControlStatus:
    from megatron_webrl.control.control_plane import TICKET_DONE, TICKET_FENCE

    end, epochs, tickets = control.job_end(), control.ticket_epochs(), None
    if epochs:
        claimed = control.claimed_slots()
        owners = control.claims(max(epochs[0].first_slot, claimed - RECENT_TICKETS), claimed)
        in_progress = sum(owner not in (TICKET_DONE, TICKET_FENCE) for owner in owners)
        tickets = TicketCounts(claimed, int(_text(control, "tickets/limit") or 0), in_progress)
    now, outcome = time.time(), None if end is None else end["outcome"]
    status = ControlStatus(outcome, job_id, bool(epochs), control.stop_requested(), tickets)
    for role in roles:
        if (heartbeat := _text(control, f"heartbeat/{role}")) is not None:
            status.heartbeat_ages[role] = _age(heartbeat, now)
        if line := control.status_of(role):
            status.status_lines[role] = line
        if count := control.instance_count(role):
            status.instance_counts[role] = count
    return status


def _text(control: ControlClient, key: str) -> str | None:
    return control.store.get(key).decode() if control.store.check([key]) else None


def _age(heartbeat: str, now: float) -> float | None:
    """Seconds since a heartbeat "<count> <unix time>" was sent; None without a time."""
    with suppress(ValueError):
        if len(fields := heartbeat.split()) > 1:
            return max(0.0, now - float(fields[-1]))
    return None


def _answer_queries() -> None:
    """Main loop of the helper process: one query per input line, one answer per output line."""
    import torch.distributed  # noqa: F401

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        query = json.loads(line)
        answer = _query(ControlAddress(query["host"], query["port"], query["job_id"]), query["roles"])
        sys.stdout.write(json.dumps(answer if isinstance(answer, str) else asdict(answer)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent(parent=int(sys.argv[1]))
    _answer_queries()
