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
    ) -> None:
        """`while_lost` is called between the attempts of a request."""
        self._while_lost = while_lost
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
            answer = self._request("POST", "/commands", body, 0.0, seconds)
        return _checked(answer)

    def claim(self, arguments: Sequence[Any], wait_seconds: float, **fields: Any) -> dict[str, Any]:
        """Run one `claim`, which waits up to `wait_seconds` until there is a slot; returns the whole answer."""
        with self._lock:
            self._number += 1
            body = {"stream": self._stream, "number": self._number, "arguments": list(arguments), "wait": wait_seconds}
            answer = self._request("POST", "/claim", body | fields, wait_seconds, None)
        return _checked(answer)

    def exchange(self, body: dict[str, Any], wait_seconds: float) -> dict[str, Any]:
        """Send a heartbeat, and wait up to `wait_seconds` for news; returns the answer. Raises ControlLost."""
        with self._lock:
            return self._request("POST", "/exchange", body | {"wait": wait_seconds}, wait_seconds, None)

    def status(self, seconds: float | None = None) -> dict[str, Any]:
        """The job at a glance. Raises ControlLost."""
        with self._lock:
            return self._request("GET", "/status", None, 0.0, seconds)

    def close(self) -> None:
        """Close the socket; a later request opens another one."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def _request(self, method: str, path: str, body: Any, wait: float, seconds: float | None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body, allow_nan=False)
        started, pause = time.monotonic(), 0.02
        limit = self.lost_seconds if seconds is None else seconds
        while True:
            left = started + limit - time.monotonic()
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
            self._http = http.client.HTTPConnection(self.address.host, self.address.port, timeout=timeout)
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
        reason = "it does not answer" if isinstance(error, socket.timeout) else getattr(error, "strerror", "") or error
        return f"lost {place}: no answer within {limit:.0f} s ({reason})"


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    for reply in answer["replies"]:
        if isinstance(reply, dict) and "error" in reply:
            raise ValueError(f"the control service refused a command: {reply['error']}")
    return answer
