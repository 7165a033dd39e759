"""HTTP requests to a browser server or router: pooled connections, a timeout each, failures as browser errors."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import Any, TypeVar

import aiohttp
from pydantic import TypeAdapter
from tenacity import wait_exponential, wait_random_exponential

from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserMissing, BrowserTimeout, PageCrashed
from megatron_webrl.browser.server import protocol
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.tls import client_context
from megatron_webrl.util import network
from megatron_webrl.util.text import first_line

CONNECT_TIMEOUT_SECONDS = 5.0
KEEPALIVE_SECONDS = 10.0  # of idle connections; servers keep theirs longer, lest a closed one looks like a dead server
TCP_KEEPIDLE_SECONDS, TCP_KEEPINTVL_SECONDS, TCP_KEEPCNT = 10, 3, 4  # only probes detect a machine that lost power
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 5.0
BACKOFF = wait_exponential(INITIAL_BACKOFF_SECONDS / 2, MAX_BACKOFF_SECONDS / 2) + wait_random_exponential(
    INITIAL_BACKOFF_SECONDS / 2, MAX_BACKOFF_SECONDS / 2
)
"""Delay before each further attempt: doubles up to the maximum; the random half spreads clients over time."""

T = TypeVar("T")
_ERROR = TypeAdapter(protocol.ErrorResponse)
_BY_OUTCOME: dict[str, type[BrowserError]] = {
    kind.outcome: kind for kind in (BrowserError, BrowserMissing, BrowserCrashed, PageCrashed, BrowserTimeout)
}


class ServerUnreachable(BrowserCrashed):
    """The browser server cannot be reached; its browsers count as crashed."""


class LeaseLost(BrowserError):
    """The browser server does not know the lease, or the lease has ended."""

    outcome = "lease_lost"


class BrowserBusy(BrowserError):
    """Every session is leased. `retry_after` is the delay in seconds that the server asked for."""

    outcome = "browser_busy"
    retry_after = 0.0


class RequestRejected(Exception):
    """A response with a status of 400 or more."""

    def __init__(self, server: str, status: int, error: protocol.ErrorResponse, retry_after: float | None) -> None:
        super().__init__(f"{server} answered {status}: {error.error}")
        self.server, self.status, self.error, self.retry_after = server, status, error, retry_after

    def to_exception(self) -> Exception:
        """The exception that a caller of a session's operation receives."""
        if self.status == 403:
            return ConfigError(str(self))
        if self.status == 401:
            return ConfigError(f"{self.server} refuses the token; set {protocol.TOKEN_VARIABLE} to that of the server")
        if self.status in (404, protocol.STATUS_LEASE_EXPIRED):
            return LeaseLost(str(self))
        if self.status == protocol.STATUS_BUSY:
            return BrowserBusy(str(self))
        if self.status == protocol.STATUS_BROWSER_FAILED:
            return to_browser_error(self.error)
        return ValueError(str(self)) if self.status < 500 else BrowserError(str(self))


def to_browser_error(error: protocol.ErrorResponse) -> BrowserError:
    """The error that the session on the server raised; an unknown outcome is kept."""
    outcome = error.outcome or BrowserError.outcome
    failure = _BY_OUTCOME.get(outcome, BrowserError)(error.error)
    failure.outcome = outcome
    return failure


def tls_context() -> ssl.SSLContext:
    """The TLS settings for farm addresses that begin with https://. Raises ConfigError."""
    return client_context(os.environ.get(protocol.CA_VARIABLE, ""), protocol.CA_VARIABLE)


class HttpClient:
    """Requests over persistent connections."""

    def __init__(self, token: str | None) -> None:
        """`token` is sent with every request, unless None. To be called in an event loop. Raises ConfigError."""
        network.use_own_threads()
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=KEEPALIVE_SECONDS,
            socket_factory=_make_socket,
            ttl_dns_cache=60,
            ssl=tls_context(),
        )
        # Servers set no cookies, and the proxies of the environment are for the web, not for the farm.
        self._http = aiohttp.ClientSession(
            connector=connector, headers=protocol.bearer_header(token), cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def request(
        self, method: str, url: str, seconds: float, body: bytes | None = None, accept: str = "application/json"
    ) -> bytes:
        """The response body. Raises RequestRejected, ServerUnreachable, ConfigError; BrowserTimeout after `seconds`."""
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/json"
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
        base = url.partition(protocol.API_PREFIX)[0]
        try:
            async with self._http.request(
                method, url, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as reply:
                content = await reply.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnreachable(f"no connection to {base} within {CONNECT_TIMEOUT_SECONDS:.0f} s") from error
        except TimeoutError as error:
            raise BrowserTimeout(f"{base} did not answer {method} {url[len(base) :]} within {seconds:.0f} s") from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{url!r} is not the address of a browser server") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"{base} cannot be reached: {first_line(error)}") from error
        if reply.status >= 300:
            raise RequestRejected(base, reply.status, _error(content), _parse_seconds(reply.headers.get("Retry-After")))
        return content


def parse_response(adapter: TypeAdapter[T], body: bytes, sender: str) -> T:
    """Parse the body of a response from `sender`. Raises BrowserError."""
    try:
        return protocol.load(adapter, body)
    except protocol.ProtocolError as error:
        raise BrowserError(f"{sender} sent an invalid response: {error}") from error


def _error(content: bytes) -> protocol.ErrorResponse:
    try:
        return protocol.load(_ERROR, content)
    except protocol.ProtocolError:
        text = content[:200].decode("utf-8", "replace").strip()
        return protocol.ErrorResponse(text.splitlines()[0] if text else "no reason given")


def _parse_seconds(text: str | None) -> float | None:
    """The value of Retry-After; dates, which no server sends, count as None."""
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_KEEPIDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TCP_KEEPINTVL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TCP_KEEPCNT)
    return sock


async def wait_until_set(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
