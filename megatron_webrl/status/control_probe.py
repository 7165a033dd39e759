"""What the control plane of a running job says. Asked as an observer: nothing is written, and no heartbeat is sent.

A process of its own asks (this module, run as a program): a control plane that was stopped takes connections and says
nothing, and a call that waits for it inside torch can only be ended with its process.
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

if TYPE_CHECKING:
    from megatron_webrl.control.control_plane import ControlClient

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0  # for everything but the start of the process that asks
START_SECONDS = 60.0  # which imports torch
RECENT_TICKETS = 2000
"""The last so many positions of the counter are looked at for groups that are being played."""


@dataclass(frozen=True)
class ControlAddress:
    """Where a control plane said that it can be reached (control.json)."""

    host: str
    port: int
    job_id: str  # what tells its job from others; empty: not said

    @classmethod
    def read(cls, path: Path) -> ControlAddress | None:
        """None without a file, or with one that says nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            return cls(fields["host"], int(fields["port"]), fields.get("job_id", ""))
        return None

    @property
    def is_loopback(self) -> bool:
        """Whether only the machine itself reaches it."""
        return self.host.startswith("127.") or self.host in ("localhost", "::1")


@dataclass(frozen=True)
class TicketCounts:
    """The counter of groups."""

    claimed: int  # positions
    limit: int
    in_progress: int  # groups that a worker has taken and not finished


@dataclass(frozen=True)
class ControlStatus:
    """What the control plane said at one moment."""

    outcome: str | None = None  # None while the job runs
    job_id: str = ""
    accepts_tickets: bool = False  # whether groups may be taken
    stop_requested: bool = False  # an early end was asked for
    tickets: TicketCounts | None = None
    status_lines: dict[str, str] = field(default_factory=dict)  # by role, in its words
    heartbeat_ages: dict[str, float | None] = field(
        default_factory=dict
    )  # age of its last heartbeat, seconds; None: unknown
    instance_counts: dict[str, int] = field(default_factory=dict)  # of a worker, from 1

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ControlStatus:
        """From `asdict`."""
        tickets = content["tickets"]
        return cls(**{**content, "tickets": None if tickets is None else TicketCounts(**tickets)})


class ControlProbe:
    """Asks control planes, each time within a limit. A context manager: its process ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ControlProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def query(
        self, address: ControlAddress, roles: Sequence[str], seconds: float = ANSWER_SECONDS
    ) -> ControlStatus | str:
        """What it says of the job and of these roles, or why there is no answer within `seconds`.

        The roles' heartbeats carry their nodes' time: an age is as right as the clocks agree.
        """
        if refused := _refused(address):
            return refused
        process = self._started()
        if process is None:
            return "the process that asks the control plane did not come up"
        question = {"host": address.host, "port": address.port, "job_id": address.job_id, "roles": list(roles)}
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        line = _line(process, seconds)
        if line is None:
            self.close()
            return f"{address.host}:{address.port} says nothing within {seconds:.0f} s"
        content = json.loads(line)
        return content if isinstance(content, str) else ControlStatus.from_json(content)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes] | None:
        """The process, once it is ready to ask."""
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
    """The next line of a process, or None if it does not come in time, or never."""
    assert process.stdout is not None
    got, deadline = b"", time.monotonic() + seconds
    while not got.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return None
        more = os.read(process.stdout.fileno(), 2**20)
        if not more:
            return None
        got += more
    return got


def _refused(address: ControlAddress) -> str | None:
    """Why nobody listens there; found out without torch."""
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"{address.host}:{address.port} does not answer ({error.strerror or error})"
    return None


def _ask(address: ControlAddress, roles: Sequence[str]) -> ControlStatus | str:
    from megatron_webrl.control.control_plane import ControlClient, JobFailed

    try:
        control = ControlClient(
            address.host, address.port, "status", heartbeat_timeout_seconds=0.0, connect_seconds=CONNECT_SECONDS
        )
        ring = _text(control, "job/id") or ""
        if address.job_id and ring != address.job_id:
            return f"another job ({ring or 'without a name'}) answers at {address.host}:{address.port}"
        return _look(control, ring, roles)
    except (JobFailed, RuntimeError) as error:  # torch's errors of a store are RuntimeErrors
        return str(error).splitlines()[0]


def _look(control: ControlClient, ring: str, roles: Sequence[str]) -> ControlStatus:
    from megatron_webrl.control.control_plane import TICKET_DONE, TICKET_FENCE

    end, starts, tickets = control.job_end(), control.ticket_epochs(), None
    if starts:
        taken = control.claimed_slots()
        owners = control.claims(max(starts[0].first_slot, taken - RECENT_TICKETS), taken)
        playing = sum(owner not in (TICKET_DONE, TICKET_FENCE) for owner in owners)
        tickets = TicketCounts(taken, int(_text(control, "tickets/limit") or 0), playing)
    now, outcome = time.time(), None if end is None else end["outcome"]
    found = ControlStatus(outcome, ring, bool(starts), control.stop_requested(), tickets)
    for role in roles:
        if (beat := _text(control, f"heartbeat/{role}")) is not None:
            found.heartbeat_ages[role] = _age(beat, now)
        if status := control.status_of(role):
            found.status_lines[role] = status
        if lives := control.instance_count(role):
            found.instance_counts[role] = lives
    return found


def _text(control: ControlClient, key: str) -> str | None:
    return control.store.get(key).decode() if control.store.check([key]) else None


def _age(beat: str, now: float) -> float | None:
    """Seconds since a heartbeat, whose last word is the time at which it was sent."""
    with suppress(ValueError):
        if len(words := beat.split()) > 1:
            return max(0.0, now - float(words[-1]))
    return None


def _answer_questions() -> None:
    """The process: a question a line, an answer a line."""
    import torch.distributed  # noqa: F401

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        question = json.loads(line)
        answer = _ask(ControlAddress(question["host"], question["port"], question["job_id"]), question["roles"])
        sys.stdout.write(json.dumps(answer if isinstance(answer, str) else asdict(answer)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent(parent=int(sys.argv[1]))
    _answer_questions()
