"""Forward proxy, the only way from a page to the network: it resolves names, checks the addresses and connects to them.

Redirects, sub-resources, workers, sockets and pop-ups pass through it too. No name is resolved twice, so a DNS server
cannot return another address after the check. Each browser context has its own port, which identifies the episode: for
proxy credentials Playwright intercepts requests and disables the cache. Pages reach no port: loopback is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import h11

from megatron_webrl.browser.egress.connections import (
    BUFFER_BYTES,
    HTTPStream,
    ProxyConnection,
    ReplayConnection,
)
from megatron_webrl.browser.egress.egress_policy import (
    JOB_ADDRESSES_VARIABLE,
    EgressPolicy,
    EgressTotals,
    Endpoint,
    NetworkAccess,
    declared_target,
)
from megatron_webrl.browser.errors import HostUnreachable
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.util.concurrency import in_own_thread

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0  # for a DNS look-up and all attempts together
CONNECT_ATTEMPT_SECONDS = 4.0
CONNECT_ATTEMPTS = 4  # addresses tried for one name
LOOKUP_THREADS = 128  # at a time; an episode uses MAX_LOOKUPS at most
BACKLOG = 128

# Addresses of a host name, which ends with a dot where search domains and /etc/hosts must not apply; raises OSError.
Resolver = Callable[[str], Awaitable[list[str]]]


class EgressProxy:
    """Opens one port per episode, the context's proxy: `open_port(declared)` first, `network.close()` at the end."""

    def __init__(self, settings: BrowserConfig, resolve: Resolver | None = None) -> None:
        """`resolve` replaces the system's resolver. Raises ConfigError."""
        self.egress_policy = EgressPolicy.from_config(settings, os.environ.get(JOB_ADDRESSES_VARIABLE, ""))
        self.totals = EgressTotals()
        self._tls = _replay_tls_context() if settings.replay else None
        self._settings = settings
        self._thread_semaphore = asyncio.Semaphore(LOOKUP_THREADS)
        self._resolve = resolve or self._look_up
        self._lookups: set[asyncio.Future[list[str]]] = set()

    async def open_port(
        self, declared: Mapping[Endpoint, Endpoint], listener: socket.socket | None = None
    ) -> NetworkAccess:
        """Open a port for one episode; `declared` as returned by `declared_endpoints` for its task source.

        `listener`: a socket that listens where the browser can reach it; by default at a loopback address.
        """
        network = NetworkAccess(self.egress_policy, declared, self._settings, self.totals)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not server.is_serving():  # accepted while the episode was ending
                writer.transport.abort()
                return
            if self._tls is not None:
                await ReplayConnection(network, self._tls, reader, writer).run()
            else:
                await ProxyConnection(network, self.connect, reader, writer).run()

        listener = listener or socket.create_server(("127.0.0.1", 0))
        server = await asyncio.start_server(serve, sock=listener, limit=BUFFER_BYTES, backlog=BACKLOG)
        network.server, network.port = server, server.sockets[0].getsockname()[1]
        return network

    def close(self) -> None:
        """Give the look-ups up; each port closes with its episode."""
        for lookup in self._lookups:
            lookup.cancel()

    async def connect(self, network: NetworkAccess, endpoint: Endpoint) -> HTTPStream:
        """Connect to an address that the policy permits. Raises EgressDenied, HostUnreachable."""
        network.egress_policy.check_endpoint(endpoint, network.declared)
        self.totals.connections += 1
        declared = declared_target(network.declared, endpoint)
        target = declared or endpoint
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                addresses = await self._addresses(network, target.host, declared is not None)
                # One forbidden address denies the name: no legitimate name mixes public and private addresses.
                for address in addresses:
                    network.egress_policy.check_address(address, endpoint, network.declared)
                reader, writer = await _first_connection(endpoint, target.port, addresses[:CONNECT_ATTEMPTS])
                return HTTPStream(h11.CLIENT, reader, writer, network.count_bytes, endpoint)
        except TimeoutError:
            raise HostUnreachable(f"{endpoint} did not answer within {CONNECT_SECONDS} s") from None

    async def _addresses(self, network: NetworkAccess, host: str, declared: bool) -> list[IPv4Address | IPv6Address]:
        try:
            return [ip_address(host)]
        except ValueError:
            pass  # a host name
        if host == "localhost" or host.endswith(".localhost"):
            return [IPv4Address("127.0.0.1")]
        try:
            texts = await self._permitted_lookup(network, host if declared else f"{host}.")
            return [ip_address(text) for text in texts]
        except (OSError, ValueError) as error:
            log.debug("no address of %s: %s", host, error)
            raise HostUnreachable(f"no address is known for {host}") from None

    async def _permitted_lookup(self, network: NetworkAccess, host: str) -> list[str]:
        """Look up a name; the permit is held until the look-up has ended, because its thread cannot be cancelled."""
        await network.lookup_semaphore.acquire()
        lookup = asyncio.ensure_future(self._resolve(host))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)
        lookup.add_done_callback(lambda lookup: network.lookup_semaphore.release())
        return await asyncio.shield(lookup)

    async def _look_up(self, host: str) -> list[str]:
        """As the system resolves names, in a thread that does not keep the process from ending."""
        async with self._thread_semaphore:
            look_up = partial(socket.getaddrinfo, host.encode(), None, type=socket.SOCK_STREAM)
            return [str(address[0]) for *_, address in await in_own_thread("lookup", look_up)]


async def _first_connection(
    endpoint: Endpoint, port: int, addresses: list[IPv4Address | IPv6Address]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reason = "no address is known"
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_ATTEMPT_SECONDS):
                # By address, not by name: no second look-up.
                return await asyncio.open_connection(str(address), port, limit=BUFFER_BYTES)
        except TimeoutError:
            reason = f"no answer within {CONNECT_ATTEMPT_SECONDS} s"
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
    raise HostUnreachable(f"{endpoint} cannot be reached: {reason}")


# TLS towards the browser during replay. The browser trusts the certificate by its key: Chromium's
# --ignore-certificate-errors-spki-list. One that ignores all errors of certificates caches nothing that comes with one.
# The key is public and protects nothing: browsers that replay reach no network, and others do not trust it.
REPLAY_KEY_DIGEST = "i2oH2xULBVQnNxTqxMFR883dI4ogkNAdCtHai8/u4RA="  # base64 of the SHA-256 of SubjectPublicKeyInfo


def _replay_tls_context() -> ssl.SSLContext:
    """The server's side of TLS, for every host, with HTTP/1.1 only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(Path(__file__).with_name("replay.pem"))
    return context
