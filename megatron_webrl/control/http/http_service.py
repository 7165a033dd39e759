"""Process of an HTTP service: socket, limits of connections, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.util import atomic_file
from megatron_webrl.util.network import is_loopback
from megatron_webrl.util.text import configure_logging

log = logging.getLogger(__name__)

KILL_TIMEOUT_SECONDS = 10.0
START_POLL_SECONDS = 0.01
MAX_HEAD_BYTES = 2**16
BACKLOG = 4096  # connections waiting to be accepted; also limited by the kernel (net.core.somaxconn)
REPORT_SECONDS = 60.0  # between two log lines about refused connections
GRACE_SECONDS = 5  # for running requests at shutdown


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of all connections and of each."""

    max_connections: int = 8192
    request_seconds: float = 10.0  # from the first byte of a request, or the connection, to the end of the body
    idle_seconds: float = 20.0  # after a response; longer than clients keep idle connections
    unread_seconds: float = 30.0  # without progress in sending a response

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"--max-connections={self.max_connections} must be at least 1")


@dataclass(frozen=True)
class ListenAddress:
    """Where to listen, and with which limits."""

    host: str
    port: int  # 0: any free port
    address_file: Path | None = None  # receives {"url", "pid"} once the server is ready
    limits: ConnectionLimits = ConnectionLimits()
    tls: ssl.SSLContext | None = None


class Listener:
    """A listening socket. `url` is its public URL."""

    def __init__(self, address: ListenAddress) -> None:
        """Raises ConfigError."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self.socket = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on --host={address.host} --port={address.port}: {error}") from None
        # Both are inherited by accepted sockets. Without NODELAY a response's body waits 40 ms until the client
        # acknowledges the headers.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(address.limits.unread_seconds * 1000))
        self.limits, self.tls, self._file = address.limits, address.tls, address.address_file
        scheme, port = "http" if self.tls is None else "https", self.socket.getsockname()[1]
        self.url = f"{scheme}://{_public_name(address.host)}:{port}"

    def write_address_file(self) -> None:
        """Write the address file atomically."""
        if self._file is not None:
            atomic_file.write_json(self._file, {"url": self.url, "pid": os.getpid()})


class _LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits of the number of connections, of the time in which a request arrives, and of its head."""

    report_at = 0.0  # of the monotonic clock: when the next refusal is logged

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None  # set while a request is arriving
        self._head_bytes = 0  # received of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > (most := self._limits.max_connections):
            if time.monotonic() >= _LimitedProtocol.report_at:
                _LimitedProtocol.report_at = time.monotonic() + REPORT_SECONDS
                log.warning(
                    "refused a connection of %s: %d are open (--max-connections)", (self.client or "?")[0], most
                )
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._start_timer()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._stop_timer()  # the time limit of idle connections holds until the next byte
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.request_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def run_process(role: str, work: Coroutine[Any, Any, int], die_with_parent: bool) -> int:
    """Run `work` until it ends or SIGTERM or SIGINT cancels it; returns the exit code. A second signal cancels the
    shutdown of `work`. Descendants that are left over are killed.
    """
    if die_with_parent:
        child_process.die_with_parent(signal.SIGTERM)
    faulthandler.enable()
    configure_logging(role)
    for orphan in child_process.sweep_orphans():
        log.warning("killed orphan %s", orphan)
    os.environ.update(child_process.owner_environment())
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):  # every connection is a file
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))
    try:
        return asyncio.run(_until_signal(work))
    finally:
        for process in child_process.kill_descendants(KILL_TIMEOUT_SECONDS):
            log.error("%s survived SIGKILL", process)


async def _until_signal(work: Coroutine[Any, Any, int]) -> int:
    loop = asyncio.get_running_loop()
    running = loop.create_task(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        return 0


@asynccontextmanager
async def run_http_server(app: ASGIApp, listener: Listener) -> AsyncIterator[asyncio.Event]:
    """Serve requests; yields an event that is set if the server stops by itself. Shutdown takes up to GRACE_SECONDS."""
    protocol: Any = functools.partial(_LimitedProtocol, listener.limits)
    tls: Any = None if listener.tls is None else lambda *_: listener.tls
    idle: Any = listener.limits.idle_seconds  # uvicorn takes any number
    server = _UvicornServer(
        uvicorn.Config(
            app, http=protocol, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
            backlog=BACKLOG, timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=idle, ssl_context_factory=tls,
        )
    )  # fmt: skip
    ended = asyncio.Event()
    running = asyncio.get_running_loop().create_task(server.serve([listener.socket]))
    running.add_done_callback(lambda _: ended.set())
    try:
        while not server.started and not running.done():
            await asyncio.sleep(START_POLL_SECONDS)
        listener.write_address_file()
        log.info("listening at %s", listener.url)
        yield ended
    finally:
        server.should_exit = True
        await running


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller, which has resources to close."""
        yield


def _public_name(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if (":" in host and not is_loopback(host)) or host == "::1" else host
