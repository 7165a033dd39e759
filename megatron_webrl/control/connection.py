"""A connection to the control service of a job. Uses only the standard library."""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from megatron_webrl.control.address import ControlAddress

log = logging.getLogger(__name__)

LOST_SECONDS = 300.0  # time without an answer after which a role gives up; a service that is restarted loses nothing
ATTEMPT_SECONDS = 10.0  # limit of one attempt, beyond the time that the request may wait for
LONGEST_PAUSE_SECONDS = 1.0  # between attempts


class JobEnded(Exception):
    """The job has ended cleanly; the role should finish and exit with code 0."""


class JobFailed(RuntimeError):
    """Another role failed or was lost. The message names it."""


class ControlLost(JobFailed):
    """The control service of the job does not answer."""


class Connection:
    """Sends requests one at a time, again if the service does not answer. May be used by several threads."""

    def __init__(
        self,
        address_file: Path,
        role: str,
        lost_seconds: float = LOST_SECONDS,
        while_lost: Callable[[], None] = lambda: None,
        relay_port: int = 0,
    ) -> None:
        """`while_lost` is called between the attempts of a request; `relay_port` of this machine: to a relay there."""
        self._while_lost, self._relay_port = while_lost, relay_port
        self.address_file, self.role, self.lost_seconds = address_file, role, lost_seconds
        self.address: ControlAddress | None = None  # of the last attempt
        self._stream = f"{role}-{secrets.token_hex(8)}"  # of numbered requests
        self._number = 0
        self._http: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    def run(self, commands: Sequence[Sequence[Any]], seconds: float | None = None, **fields: Any) -> dict[str, Any]:
        """Run commands of the state machine, each once however often they are sent; returns the whole answer.

        `fields`: more of the request. Raises ValueError if one fails, ControlLost without an answer.
        """
        with self._lock:
            self._number += 1
            body = {"stream": self._stream, "number": self._number, "commands": list(map(list, commands)), **fields}
            answer = self._request("POST", "/commands", lambda: body, 0.0, seconds)
        return _checked(answer)

    def claim(self, arguments: Sequence[Any], wait_seconds: float, **fields: Any) -> dict[str, Any]:
        """Run one `claim`, which waits up to `wait_seconds` until there is a slot; returns the whole answer."""
        with self._lock:
            self._number += 1
            body = {"stream": self._stream, "number": self._number, "arguments": list(arguments), "wait": wait_seconds}
            answer = self._request("POST", "/claim", lambda: body | fields, wait_seconds, None)
        return _checked(answer)

    def exchange(self, make_body: Callable[[], dict[str, Any]], wait_seconds: float) -> tuple[Any, dict[str, Any]]:
        """Send reports, and wait up to `wait_seconds` for news; returns the body that was answered, and the answer.

        Each attempt has a body of its own, so that none reports an earlier heartbeat. Raises ControlLost.
        """
        bodies = []

        def make() -> dict[str, Any]:
            bodies.append(make_body())
            return bodies[-1] | {"wait": wait_seconds}

        with self._lock:
            answer = self._request("POST", "/exchange", make, wait_seconds, None)
        return bodies[-1], answer

    def job(self, seconds: float | None = None) -> dict[str, Any]:
        """What does not change of the job: {"job_id", "heartbeat_timeout_seconds"}. Raises ControlLost."""
        with self._lock:
            return self._request("GET", "/job", None, 0.0, seconds)

    def status(self, seconds: float | None = None) -> dict[str, Any]:
        """The job at a glance. Raises ControlLost."""
        with self._lock:
            return self._request("GET", "/status", None, 0.0, seconds)

    def rollouts(self, episodes: Sequence[str], seconds: float | None = None) -> dict[str, Any]:
        """What each rollout does; workers write these episodes to files for a while. Raises ControlLost."""
        query = urlencode([("episode", each) for each in episodes])
        with self._lock:
            return self._request("GET", f"/rollouts?{query}", None, 0.0, seconds)

    def close(self) -> None:
        """Close the socket; a later request opens another one."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def _request(
        self,
        method: str,
        path: str,
        make_body: Callable[[], dict[str, Any]] | None,
        wait: float,
        seconds: float | None,
    ) -> dict[str, Any]:
        started, pause = time.monotonic(), 0.02
        limit = self.lost_seconds if seconds is None else seconds
        while True:
            left = started + limit - time.monotonic()
            content = None if make_body is None else json.dumps(make_body(), allow_nan=False)
            try:
                return self._attempt(method, path, content, wait + min(ATTEMPT_SECONDS, max(left, 0.1)))
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() - started + pause > limit:
                    raise ControlLost(f"{self.role} {self._failure(limit, error)}") from error
            self._while_lost()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _attempt(self, method: str, path: str, content: str | None, timeout: float) -> dict[str, Any]:
        if self._http is None:
            self.address = ControlAddress.read(self.address_file)
            if self.address is None:
                raise FileNotFoundError(f"{self.address_file} does not name it yet")
            host, port = self.address.host, self.address.port
            host, port = ("127.0.0.1", self._relay_port) if self._relay_port else (host, port)
            self._http = http.client.HTTPConnection(host, port, timeout=timeout)
        assert self.address is not None
        if self._http.sock is not None:
            self._http.sock.settimeout(timeout)
        headers = {"Authorization": f"Bearer {self.address.token}", "Content-Type": "application/json"}
        self._http.request(method, path, content, headers)
        response = self._http.getresponse()
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
        place = f"the control service at {self.address.host}:{self.address.port}"
        place = f"the relay at 127.0.0.1:{self._relay_port}" if self._relay_port else place
        reason = "it does not answer" if isinstance(error, socket.timeout) else getattr(error, "strerror", "") or error
        return f"lost {place}: no answer within {limit:.0f} s ({reason})"


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    for reply in answer["replies"]:
        if isinstance(reply, dict) and "error" in reply:
            raise ValueError(f"the control service refused a command: {reply['error']}")
    return answer
