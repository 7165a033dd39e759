"""The only way from a page to the network: a forward proxy that looks names up itself, checks the addresses that it
finds, and connects to those very addresses.

Redirects, sub-resources, workers, sockets and pop-ups are all requests to it, and there is no second look-up that a
name's owner could answer differently. Each browser context has a port of its own, by which its episode is known.
Credentials would tell as well, but Playwright answers for them by intercepting every request and switching the cache
off; and no page can reach another's port, for the gateway refuses loopback addresses.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, ip_address

from megatron_webrl.browser.egress.egress_policy import EgressDenied, EgressPolicy, Endpoint
from megatron_webrl.browser.egress.http1 import MAX_HEAD_BYTES
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.egress.proxy_connection import ProxyConnection, UpstreamConnection
from megatron_webrl.browser.errors import HostUnreachable
from megatron_webrl.config.browser import BrowserConfig

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0  # of a look-up and all attempts together
CONNECT_ATTEMPT_SECONDS = 4.0
CONNECT_ATTEMPTS = 4  # addresses of a name that are tried
LOOKUP_THREADS = 32
BACKLOG = 128

Resolver = Callable[[str], Awaitable[list[str]]]
"""The addresses of a host name. Raises OSError."""


class EgressProxy:
    """Example: `access = await gateway.admit(declared)`, a context with the proxy `127.0.0.1:<access.port>`, and
    `await access.close()` at the episode's end.
    """

    def __init__(self, settings: BrowserConfig, resolve: Resolver | None = None) -> None:
        """`resolve` stands in for the system's name service. Raises ConfigError."""
        self.egress_policy = EgressPolicy.from_config(settings)
        self.refused: Counter[str] = Counter()
        self._settings = settings
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")
        self._resolve = resolve or self._look_up

    async def open_port(self, declared: Mapping[Endpoint, Endpoint]) -> NetworkAccess:
        """Open a port for one episode, whose task source declares these endpoints; see `declared_endpoints`."""
        access = NetworkAccess(self.egress_policy, declared, self._settings, self.refused)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not server.is_serving():  # accepted while the episode ended
                writer.transport.abort()
                return
            await ProxyConnection(access, self.connect, self._settings.request_timeout_seconds, reader, writer).run()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES, backlog=BACKLOG)
        access.server, access.port = server, server.sockets[0].getsockname()[1]
        return access

    def close(self) -> None:
        """Give the threads back; ports are closed with their episodes."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def connect(self, access: NetworkAccess, endpoint: Endpoint) -> UpstreamConnection:
        """A connection to an address that policy permits. Raises Refused, Unreachable."""
        if self._settings.replay:
            raise EgressDenied("replay", f"{endpoint} is not reached: pages come from archives (browser.replay)")
        access.egress_policy.check_endpoint(endpoint, access.declared)
        target = access.declared.get(endpoint, endpoint)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                addresses = await self._addresses(access, target.host)
                # One forbidden address among several spoils the name: honest ones do not mix.
                for address in addresses:
                    access.egress_policy.check_address(address, endpoint, access.declared)
                return await _first_connection(endpoint, target.port, addresses[:CONNECT_ATTEMPTS])
        except TimeoutError:
            raise HostUnreachable(f"{endpoint} did not answer within {CONNECT_SECONDS} s") from None

    async def _addresses(self, access: NetworkAccess, host: str) -> list[IPv4Address | IPv6Address]:
        try:
            return [ip_address(host)]
        except ValueError:
            pass  # a name
        if host == "localhost" or host.endswith(".localhost"):
            return [IPv4Address("127.0.0.1")]
        try:
            async with access.lookup_semaphore:
                return [ip_address(text) for text in await self._resolve(host)]
        except (OSError, ValueError) as error:
            log.debug("no address of %s: %s", host, error)
            raise HostUnreachable(f"no address is known for {host}") from None

    async def _look_up(self, host: str) -> list[str]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]


async def _first_connection(
    endpoint: Endpoint, port: int, addresses: list[IPv4Address | IPv6Address]
) -> UpstreamConnection:
    reason = "no address is known"
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_ATTEMPT_SECONDS):
                # An address, not a name: nothing is looked up again.
                reader, writer = await asyncio.open_connection(str(address), port, limit=MAX_HEAD_BYTES)
                return UpstreamConnection(endpoint, reader, writer)
        except TimeoutError:
            reason = f"no answer within {CONNECT_ATTEMPT_SECONDS} s"
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
    raise HostUnreachable(f"{endpoint} cannot be reached: {reason}")
