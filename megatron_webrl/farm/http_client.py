"""One HTTP call to a node or router: pooled connections, a limit for each, and failures as errors of the browser."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
from pydantic import TypeAdapter

from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserMissing, BrowserTimeout, PageCrashed
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.farm import protocol

CONNECT_TIMEOUT_SECONDS = 5.0
KEEPALIVE_SECONDS = 10.0
"""Connections that carried nothing for so long are not used again. Nodes keep theirs for longer: a request that met a
connection just closed would look like a dead node."""

TCP_KEEPIDLE_SECONDS, TCP_KEEPINTVL_SECONDS, TCP_KEEPCNT = 10, 3, 4
"""A silent connection is probed by the kernel after so many seconds, so often, this many times: a machine that lost
its power answers nothing, not even a refusal."""

INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 5.0  # seconds between attempts

_ERROR = TypeAdapter(protocol.ErrorResponse)
_BY_OUTCOME: dict[str, type[BrowserError]] = {
    kind.outcome: kind for kind in (BrowserError, BrowserMissing, BrowserCrashed, PageCrashed, BrowserTimeout)
}


class ServerUnreachable(BrowserCrashed):
    """A node that cannot be spoken to; its browsers are taken for dead."""


class LeaseLost(BrowserError):
    """The node does not know the lease, or no longer."""

    outcome = "lease_lost"


class BrowserBusy(BrowserError):
    """No place was free for as long as one was waited for."""

    outcome = "browser_busy"


class RequestRejected(Exception):
    """An answer with a status of 400 and more."""

    def __init__(self, server: str, status: int, error: protocol.ErrorResponse, retry_after: float | None) -> None:
        super().__init__(f"{server} answered {status}: {error.error}")
        self.server, self.status, self.error, self.retry_after = server, status, error, retry_after

    def to_exception(self) -> Exception:
        """What it means to whoever asked for a session's operation."""
        if self.status == 403:
            return ConfigError(str(self))
        if self.status == 401:
            return ConfigError(f"{self.server} refuses the token; set {protocol.TOKEN_VARIABLE} to the one of its node")
        if self.status in (404, protocol.STATUS_LEASE_EXPIRED):
            return LeaseLost(str(self))
        if self.status == protocol.STATUS_BUSY:
            return BrowserBusy(str(self))
        if self.status == protocol.STATUS_BROWSER_FAILED:
            return to_browser_error(self.error)
        return ValueError(str(self)) if self.status < 500 else BrowserError(str(self))


def to_browser_error(error: protocol.ErrorResponse) -> BrowserError:
    """The error that the session on the node raised; one of an unknown outcome keeps its outcome."""
    failure = _BY_OUTCOME.get(error.outcome or BrowserError.outcome, BrowserError)(error.error)
    failure.outcome = error.outcome or BrowserError.outcome
    return failure


class HttpClient:
    """Requests over connections that are kept. A context manager of asyncio."""

    def __init__(self, token: str | None) -> None:
        """`token` is sent with every request; None: none is."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_SECONDS, socket_factory=_probed_socket, ttl_dns_cache=60
        )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Cookies of a node mean nothing, and proxies of the environment are for the web, not for the farm.
        self._http = aiohttp.ClientSession(
            connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def request(
        self, method: str, url: str, seconds: float, body: bytes | None = None, accept: str = "application/json"
    ) -> bytes:
        """The body of the answer, whole within `seconds`. Raises Refused, NodeGone, BrowserTimeout."""
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/json"
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
        whom = url.partition(protocol.API_PREFIX)[0]
        try:
            async with self._http.request(
                method, url, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as answer:
                content = await answer.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnreachable(f"{whom} cannot be connected to within {CONNECT_TIMEOUT_SECONDS:.0f} s") from error
        except TimeoutError as error:
            raise BrowserTimeout(f"{whom} did not answer {method} {url[len(whom) :]} within {seconds:.0f} s") from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{url!r} is not an address of a node") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ServerUnreachable(f"{whom} cannot be reached: {reason}") from error
        if answer.status >= 300:
            raise RequestRejected(whom, answer.status, _error(content), _seconds(answer.headers.get("Retry-After")))
        return content


def backoff_delays() -> Iterator[float]:
    """Seconds to wait before each further attempt: rising, and spread out so that clients do not come together."""
    longest = INITIAL_BACKOFF_SECONDS
    while True:
        yield random.uniform(longest / 2, longest)
        longest = min(2 * longest, MAX_BACKOFF_SECONDS)


def _error(content: bytes) -> protocol.ErrorResponse:
    try:
        return protocol.load(_ERROR, content)
    except protocol.ProtocolError:
        text = content[:200].decode("utf-8", "replace").strip()
        return protocol.ErrorResponse(text.splitlines()[0] if text else "no reason given")


def _seconds(text: str | None) -> float | None:
    """The value of Retry-After; dates, which no node sends, count as none."""
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


def _probed_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_KEEPIDLE_SECONDS)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TCP_KEEPINTVL_SECONDS)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TCP_KEEPCNT)
    return found


async def wait_until_set(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, `seconds` at most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
