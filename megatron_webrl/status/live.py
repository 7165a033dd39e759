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

from megatron_webrl.processes import die_with_parent

if TYPE_CHECKING:
    from megatron_webrl.control import Control

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0  # for everything but the start of the process that asks
START_SECONDS = 60.0  # which imports torch
TICKETS = 2000
"""The last so many positions of the counter are looked at for groups that are being played."""


@dataclass(frozen=True)
class Address:
    """Where a control plane said that it can be reached (control.json)."""

    host: str
    port: int
    ring: str  # what tells its job from others; empty: not said

    @classmethod
    def read(cls, path: Path) -> Address | None:
        """None without a file, or with one that says nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            return cls(fields["host"], int(fields["port"]), fields.get("ring", ""))
        return None

    @property
    def local(self) -> bool:
        """Whether only the machine itself reaches it."""
        return self.host.startswith("127.") or self.host in ("localhost", "::1")


@dataclass(frozen=True)
class Tickets:
    """The counter of groups."""

    taken: int  # positions
    limit: int
    playing: int  # groups that a worker has taken and not finished


@dataclass(frozen=True)
class Answer:
    """What the control plane said at one moment."""

    outcome: str | None = None  # None while the job runs
    ring: str = ""
    opened: bool = False  # whether groups may be taken
    stopping: bool = False  # an early end was asked for
    tickets: Tickets | None = None
    doing: dict[str, str] = field(default_factory=dict)  # by role, in its words
    beats: dict[str, float | None] = field(default_factory=dict)  # age of its last heartbeat, seconds; None: unknown
    lives: dict[str, int] = field(default_factory=dict)  # of a worker, from 1

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Answer:
        """From `asdict`."""
        tickets = content["tickets"]
        return cls(**{**content, "tickets": None if tickets is None else Tickets(**tickets)})


class Observer:
    """Asks control planes, each time within a limit. A context manager: its process ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, address: Address, roles: Sequence[str], seconds: float = ANSWER_SECONDS) -> Answer | str:
        """What it says of the job and of these roles, or why there is no answer within `seconds`.

        The roles' heartbeats carry their nodes' time: an age is as right as the clocks agree.
        """
        if refused := _refused(address):
            return refused
        process = self._started()
        if process is None:
            return "the process that asks the control plane did not come up"
        question = {"host": address.host, "port": address.port, "ring": address.ring, "roles": list(roles)}
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        line = _line(process, seconds)
        if line is None:
            self.close()
            return f"{address.host}:{address.port} says nothing within {seconds:.0f} s"
        content = json.loads(line)
        return content if isinstance(content, str) else Answer.from_json(content)

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
                [sys.executable, "-m", "megatron_webrl.status.live", str(os.getpid())],
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


def _refused(address: Address) -> str | None:
    """Why nobody listens there; found out without torch."""
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"{address.host}:{address.port} does not answer ({error.strerror or error})"
    return None


def _ask(address: Address, roles: Sequence[str]) -> Answer | str:
    from megatron_webrl.control import Control, JobFailed

    try:
        control = Control(address.host, address.port, "status", lost_seconds=0.0, connect_seconds=CONNECT_SECONDS)
        ring = _text(control, "job/ring") or ""
        if address.ring and ring != address.ring:
            return f"another job ({ring or 'without a name'}) answers at {address.host}:{address.port}"
        return _look(control, ring, roles)
    except (JobFailed, RuntimeError) as error:  # torch's errors of a store are RuntimeErrors
        return str(error).splitlines()[0]


def _look(control: Control, ring: str, roles: Sequence[str]) -> Answer:
    from megatron_webrl.control import DONE, FENCE

    end, starts, tickets = control.end(), control.starts(), None
    if starts:
        taken = control.taken()
        owners = control.signatures(max(starts[0].first, taken - TICKETS), taken)
        playing = sum(owner not in (DONE, FENCE) for owner in owners)
        tickets = Tickets(taken, int(_text(control, "tickets/limit") or 0), playing)
    now, outcome = time.time(), None if end is None else end["outcome"]
    found = Answer(outcome, ring, bool(starts), control.stop_requested(), tickets)
    for role in roles:
        if (beat := _text(control, f"beat/{role}")) is not None:
            found.beats[role] = _age(beat, now)
        if status := control.status_of(role):
            found.doing[role] = status
        if lives := control.lives(role):
            found.lives[role] = lives
    return found


def _text(control: Control, key: str) -> str | None:
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
        answer = _ask(Address(question["host"], question["port"], question["ring"]), question["roles"])
        sys.stdout.write(json.dumps(answer if isinstance(answer, str) else asdict(answer)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent(parent=int(sys.argv[1]))
    _answer_questions()
