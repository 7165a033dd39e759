"""Limits of connections to an HTTP service: in number, and in time for a request to arrive."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_webrl.config.setting import ConfigError

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 2**16
REPORT_SECONDS = 60.0  # between two log lines about refused connections


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of all connections and of each."""

    max_connections: int = 8192
    max_per_address: int = 2048  # of IPv6: from one network of 64 bits
    request_seconds: float = 10.0  # from the first byte of a request, or the connection, to the end of the body
    idle_seconds: float = 20.0  # after a response; longer than clients keep idle connections
    unread_seconds: float = 30.0  # without progress in sending a response

    def __post_init__(self) -> None:
        for option, value in (
            ("--max-connections", self.max_connections),
            ("--max-connections-per-address", self.max_per_address),
        ):
            if value < 1:
                raise ConfigError(f"{option}={value} must be at least 1")


class LimitedSocket(socket.socket):
    """A listening socket whose accept() closes connections beyond the limits: TLS handshakes count too."""

    def __init__(self, listening: socket.socket, limits: ConnectionLimits) -> None:
        """`listening` is detached."""
        super().__init__(fileno=listening.detach())
        self._limits = limits
        self._open: Counter[str] = Counter()  # connections by address
        self._next_report = 0.0  # of the monotonic clock
        # Both are inherited by accepted sockets. Without NODELAY a response's body waits 40 ms until the client
        # acknowledges the headers.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.unread_seconds * 1000))

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection within the limits. Raises BlockingIOError if there is none."""
        while True:
            connection, peer = super().accept()
            address = _network(peer[0])
            problem = self._problem(address)
            if problem is None:
                self._open[address] += 1
                return _Connection(connection, partial(self._forget, address)), peer
            connection.close()
            if time.monotonic() >= self._next_report:
                self._next_report = time.monotonic() + REPORT_SECONDS
                log.warning("refused a connection of %s: %s", peer[0], problem)

    def _problem(self, address: str) -> str | None:
        if self._open.total() >= self._limits.max_connections:
            return f"{self._limits.max_connections} are open, the limit in all (--max-connections)"
        if self._open[address] >= self._limits.max_per_address:
            return f"it has {self._limits.max_per_address}, the limit of an address (--max-connections-per-address)"
        return None

    def _forget(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class _Connection(socket.socket):
    def __init__(self, connection: socket.socket, closed: Callable[[], None]) -> None:
        super().__init__(fileno=connection.detach())
        self._on_close: Callable[[], None] | None = closed

    def close(self) -> None:
        super().close()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


class TimedProtocol(HttpToolsProtocol):
    """HTTP/1.1 that closes a connection whose next request does not arrive within `seconds`: head and body. A head has
    up to MAX_HEAD_BYTES. A client that sends a request before the response of the previous one gets no other: it
    cannot queue up work.
    """

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None  # set while a request is arriving
        self._head_bytes = 0  # received of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_answering():
            self._refuse_more()
            return
        super().data_received(data)
        if self._is_answering():
            self._stop_timer()
            return
        self._start_timer()
        if self._awaits_head():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        if self._is_answering():
            self._refuse_more()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if self._awaits_head():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_answering():
            super().on_body(body)

    def on_response_complete(self) -> None:
        self._stop_timer()  # the time limit of idle connections holds until the next byte
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _is_answering(self) -> bool:
        """Whether a request has arrived whose response is not complete."""
        return not self._awaits_head() and not self.cycle.more_body

    def _refuse_more(self) -> None:
        """Close after this response; no client of today sends a request before it has the previous response."""
        self.cycle.keep_alive = False
        self.transport.pause_reading()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _network(address: str) -> str:
    """The addresses that count as one: an IPv4 address, or an IPv6 network of 64 bits."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))
