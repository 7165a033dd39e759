"""Requests to the control service of a job, or to the relay of a node. Uses only the standard library."""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from megatron_webrl.util import atomic_file

FILE = "control.json"  # in the run's folder: address and token of the service
LOST_SECONDS = 300.0  # time without an answer after which a role gives up; a service that is restarted loses nothing
ATTEMPT_SECONDS = 10.0  # limit of one attempt, beyond the time that the request may wait for
LONGEST_PAUSE_SECONDS = 1.0  # between attempts


class JobEnded(Exception):
    """The job has ended cleanly; the role should finish and exit with code 0."""


class JobFailed(RuntimeError):
    """Another role failed or was lost. The message names it."""


class ControlLost(JobFailed):
    """The control service of the job does not answer."""


@dataclass(frozen=True)
class ControlAddress:
    """Where the control service of a job listens: control.json in the run's folder, which only its user can read."""

    host: str
    port: int
    pid: int
    job_id: str
    token: str  # that every request must carry

    @classmethod
    def read(cls, path: Path) -> ControlAddress | None:
        """Read the file; None without a valid one."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            return cls(fields["host"], int(fields["port"]), int(fields["pid"]), fields["job_id"], fields["token"])
        return None

    def write(self, path: Path) -> None:
        """Write the file atomically, for its user only."""
        atomic_file.write_json(path, asdict(self), mode=0o600)


class _Line:
    """A socket, and the stream of its numbered requests."""

    def __init__(self) -> None:
        self.http: http.client.HTTPConnection | None = None
        self.stream, self.number = secrets.token_hex(8), 0

    def close(self) -> None:
        if self.http is not None:
            self.http.close()
        self.http = None


class Connection:
    """Sends requests, again if there is no answer. May be used by several threads: each request has its own socket."""

    def __init__(
        self,
        address_file: Path,
        role: str,
        lost_seconds: float = LOST_SECONDS,
        while_lost: Callable[[], None] = lambda: None,
        relay_port: int = 0,
    ) -> None:
        """`while_lost` is called between the attempts of a request; `relay_port` of this machine: to a relay there."""
        self.address_file, self.role, self.lost_seconds = address_file, role, lost_seconds
        self.address: ControlAddress | None = None  # of the last attempt
        self._while_lost, self._relay_port = while_lost, relay_port
        self._idle: list[_Line] = []

    def sync(
        self,
        commands: Sequence[Sequence[Any]] = (),
        make_fields: Callable[[], dict[str, Any]] = dict,
        wait_seconds: float = 0.0,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """POST /sync: run commands of the state machine, each once however often they are sent; returns the answer.

        `make_fields` makes the other fields of the request, anew for each attempt, so that none reports an earlier
        heartbeat. The service may wait up to `wait_seconds`; `seconds` limits the time without an answer. Raises
        ValueError if a command fails, ControlLost without an answer.
        """

        def make_body(line: _Line) -> dict[str, Any]:
            numbered = {"stream": f"{self.role}-{line.stream}", "number": line.number, "commands": commands}
            return make_fields() | {"wait": wait_seconds} | (numbered if commands else {})

        answer = self._request("/sync", seconds, make_body, wait_seconds)
        for reply in answer["replies"]:
            if isinstance(reply, dict) and "error" in reply:
                raise ValueError(f"the control service refused a command: {reply['error']}")
        return answer

    def connect(self, seconds: float | None = None) -> ControlAddress:
        """The address of the service, which has answered. Raises ControlLost."""
        self.sync(seconds=seconds)
        assert self.address is not None
        return self.address

    def status(self, seconds: float | None = None) -> dict[str, Any]:
        """The job at a glance. Raises ControlLost."""
        return self._request("/status", seconds)

    def rollouts(self, episodes: Sequence[str], seconds: float | None = None) -> dict[str, Any]:
        """What each rollout does; workers write these episodes to files for a while. Raises ControlLost."""
        return self._request(f"/rollouts?{urlencode([('episode', each) for each in episodes])}", seconds)

    def close(self) -> None:
        """Close the idle sockets; a later request opens another one."""
        while self._idle:
            self._idle.pop().close()

    def _request(
        self,
        path: str,
        seconds: float | None,
        make_body: Callable[[_Line], dict[str, Any]] | None = None,
        wait: float = 0.0,
    ) -> dict[str, Any]:
        line = _Line()
        with suppress(IndexError):
            line = self._idle.pop()
        line.number += 1
        started, pause = time.monotonic(), 0.02
        limit = self.lost_seconds if seconds is None else seconds
        while True:
            left = started + limit - time.monotonic()
            content = None if make_body is None else json.dumps(make_body(line), allow_nan=False)
            try:
                answer = self._attempt(line, path, content, wait + min(ATTEMPT_SECONDS, max(left, 0.1)))
            except (OSError, http.client.HTTPException) as error:
                line.close()
                if time.monotonic() - started + pause > limit:
                    raise ControlLost(f"{self.role} {self._failure(limit, error)}") from error
            else:
                self._idle.append(line)
                return answer
            self._while_lost()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _attempt(self, line: _Line, path: str, content: str | None, timeout: float) -> dict[str, Any]:
        if line.http is None:
            self.address = ControlAddress.read(self.address_file)
            if self.address is None:
                raise FileNotFoundError(f"{self.address_file} does not name it yet")
            host, port = self.address.host, self.address.port
            host, port = ("127.0.0.1", self._relay_port) if self._relay_port else (host, port)
            line.http = http.client.HTTPConnection(host, port, timeout=timeout)
        assert self.address is not None
        if line.http.sock is not None:
            line.http.sock.settimeout(timeout)
        headers = {"Authorization": f"Bearer {self.address.token}", "Content-Type": "application/json"}
        line.http.request("GET" if content is None else "POST", path, content, headers)
        response = line.http.getresponse()
        data = response.read()
        if response.status == http.client.BAD_REQUEST:
            raise ValueError(f"{self.role}: {json.loads(data)['error']}")
        if response.status == http.client.UNAUTHORIZED:  # at the address in the file of an earlier job
            raise http.client.HTTPException("another job answers")
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"it answers {response.status}: {data[:200].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _failure(self, limit: float, error: Exception) -> str:
        if self.address is None:
            return f"cannot reach the control service within {limit:.0f} s: {error}"
        relayed = f"the relay at 127.0.0.1:{self._relay_port}"
        place = relayed if self._relay_port else f"the control service at {self.address.host}:{self.address.port}"
        reason = "it does not answer" if isinstance(error, socket.timeout) else getattr(error, "strerror", "") or error
        return f"lost {place}: no answer within {limit:.0f} s ({reason})"
