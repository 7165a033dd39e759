"""Router of browser servers: places and finds leases. All state comes from heartbeats: it may restart at any time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from pydantic import TypeAdapter

from megatron_webrl.browser.server.http_client import tls_context
from megatron_webrl.browser.server.leases import LeaseExpired, NoCapacity
from megatron_webrl.browser.server.metrics import RouterMetrics
from megatron_webrl.browser.server.protocol import (
    API_PREFIX,
    STATUS_BUSY,
    ErrorResponse,
    InvalidRequest,
    Lease,
    LeaseRequest,
    ProtocolError,
    RegisteredServer,
    RouterState,
    ServerState,
    bearer_header,
    dump,
    load,
)
from megatron_webrl.control.http.tokens import Token

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
HEARTBEAT_TIMEOUT_SECONDS = 6.0  # without a heartbeat a server counts as dead
FORGET_SERVER_SECONDS = 600.0
MAX_ENDED_INSTANCES = 1024  # forgotten server instances whose reason is remembered
LEASE_REQUEST_TIMEOUT_SECONDS, CONNECT_TIMEOUT_SECONDS = 20.0, 2.0
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SERVER = 512, 64
NO_SERVER = "no browser server has sent a heartbeat lately"

_lease_adapter, _error_adapter = TypeAdapter(Lease), TypeAdapter(ErrorResponse)


class RouterStarting(Exception):
    """The router does not know the server yet; the message is one sentence."""


@dataclass
class _Server:
    """One instance of a browser server."""

    state: ServerState
    last_heartbeat: float
    free: int  # of the latest heartbeat, less the leases placed since
    pending: int = 0  # lease requests without a response yet
    failure: str | None = None  # why it counts as dead despite its heartbeats


class Router:
    """Life cycle: `async with Router(token)`. Servers register by heartbeat; leases are placed on the least loaded."""

    def __init__(self, token: Token | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`token`: that of the clients, which the servers know too."""
        self._token, self._clock = token, clock
        self._started = clock()
        self._servers: dict[str, _Server] = {}  # by instance_id, the first part of a lease id
        self._ended: OrderedDict[str, str] = OrderedDict()  # reason by instance_id
        self._client: aiohttp.ClientSession | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._last_tick: float | None = None
        self.metrics = RouterMetrics()
        self.metrics.register_gauges(self.state)

    async def __aenter__(self) -> Router:
        self._client = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"} | bearer_header(self._token.value if self._token else None),
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, limit_per_host=MAX_CONNECTIONS_PER_SERVER, ssl=tls_context()
            ),
            timeout=aiohttp.ClientTimeout(total=LEASE_REQUEST_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS),
        )
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def register(self, state: ServerState) -> None:
        """Process a heartbeat. Raises InvalidRequest."""
        if not state.url.startswith(("http://", "https://")) or not state.instance_id or "-" in state.instance_id:
            raise InvalidRequest(
                f"url, instance_id: {state.url[:80]!r} with {state.instance_id[:80]!r} is no browser server"
            )
        for key, other in list(self._servers.items()):
            if other.state.url == state.url and key != state.instance_id:
                self._forget(key, f"browser server {state.url} has been restarted")
            elif self._clock() - other.last_heartbeat > FORGET_SERVER_SECONDS:
                self._forget(key, f"browser server {other.state.url} sent no heartbeat for {FORGET_SERVER_SECONDS:g} s")
        known = self._servers.get(state.instance_id)
        if known is None:
            log.info(
                "browser server %s registered: %d sessions, %d leased", state.url, state.sessions, len(state.leases)
            )
            known = self._servers[state.instance_id] = _Server(state, self._clock(), state.free)
        # The heartbeat may or may not count the pending leases; counting them twice is the safe side.
        known.state, known.last_heartbeat, known.failure = state, self._clock(), None
        known.free = max(0, state.free - known.pending)

    async def place_lease(self, request: LeaseRequest) -> Lease:
        """Lease a session of the server with the most free ones. Raises NoCapacity, InvalidRequest."""
        tried: set[str] = set()
        while True:
            choices = [server for server in self._alive() if server.free > 0 and server.state.instance_id not in tried]
            if not choices:
                self.metrics.refused_leases.inc()
                raise NoCapacity(self._no_capacity_message())
            server = max(choices, key=lambda server: (server.free, random.random()))
            tried.add(server.state.instance_id)
            lease = await self._request_lease(server, request)
            if lease is not None:
                self.metrics.placed_leases.inc()
                return lease

    def server_of(self, lease_id: str) -> str:
        """Address of the server that granted the lease. Raises LeaseExpired, RouterStarting."""
        instance = lease_id.partition("-")[0]
        known = self._servers.get(instance)
        if known is not None:
            if reason := self._death_reason(known):
                raise LeaseExpired(f"browser server {known.state.url} {reason}; its leases are lost")
            return known.state.url
        if instance in self._ended:
            raise LeaseExpired(f"{self._ended[instance]}; its leases are lost")
        if self._clock() - self._started < HEARTBEAT_TIMEOUT_SECONDS:
            raise RouterStarting("the router has just started and does not know the server of this lease yet")
        raise LeaseExpired("the server of this lease is unknown")

    def state(self) -> RouterState:
        """The state of the router and its servers."""
        alive = self._alive()
        return RouterState(
            sessions=sum(server.state.sessions for server in alive),
            free=sum(server.free for server in alive),
            leases=sum(len(server.state.leases) for server in alive),
            servers=tuple(self._describe(server) for server in self._servers.values()),
        )

    def environments(self) -> dict[str, tuple[str, ...]]:
        """The environments of all live servers, by source."""
        environments: dict[str, set[str]] = {}
        for server in self._alive():
            for source, names in server.state.sources.items():
                environments.setdefault(source, set()).update(names)
        return {source: tuple(sorted(names)) for source, names in environments.items()}

    async def health_problem(self) -> str | None:
        """Why no lease can be granted, apart from full servers; None if one can."""
        return None if self._alive() else NO_SERVER

    async def _request_lease(self, server: _Server, request: LeaseRequest) -> Lease | None:
        """A lease of this server; None if it grants none. Raises InvalidRequest."""
        assert self._client is not None, "Router is a context manager: async with Router(...) as router"
        server.free -= 1
        server.pending += 1
        try:
            async with self._client.post(f"{server.state.url}{API_PREFIX}/leases", data=dump(request)) as reply:
                body = await reply.read()
                if reply.status == 201:
                    return load(_lease_adapter, body)
                if reply.status == STATUS_BUSY:
                    server.free = 0  # until the next heartbeat
                    return None
                if reply.status == 400:
                    raise InvalidRequest(load(_error_adapter, body).error)
                log.error("browser server %s answered a lease request with status %d", server.state.url, reply.status)
        except aiohttp.ClientConnectorError:
            server.failure = "refuses connections"
            log.warning("browser server %s refuses connections; it counts as dead", server.state.url)
        except (aiohttp.ClientError, TimeoutError, ProtocolError) as error:
            log.warning("browser server %s granted no lease: %s: %s", server.state.url, type(error).__name__, error)
        finally:
            server.pending -= 1
        return None

    def _alive(self) -> list[_Server]:
        return [server for server in self._servers.values() if not self._death_reason(server)]

    async def _tick(self) -> None:
        """Subtract the time in which this process did not run, stopped or without CPU, from every heartbeat age."""
        while True:
            self._last_tick = self._clock()
            await asyncio.sleep(TICK_SECONDS)
            late = self._late()
            for server in self._servers.values():
                server.last_heartbeat = min(server.last_heartbeat + late, self._clock())

    def _late(self) -> float:
        """Seconds by which the next tick is late."""
        return 0.0 if self._last_tick is None else max(0.0, self._clock() - self._last_tick - TICK_SECONDS)

    def _death_reason(self, server: _Server) -> str | None:
        """Why a server counts as dead; None if it is alive."""
        age = self._clock() - server.last_heartbeat - self._late()
        return server.failure or (f"sent no heartbeat for {age:.1f} s" if age > HEARTBEAT_TIMEOUT_SECONDS else None)

    def _no_capacity_message(self) -> str:
        alive = self._alive()
        if not alive:
            return NO_SERVER
        return f"all {sum(server.state.sessions for server in alive)} sessions of {len(alive)} servers are leased"

    def _describe(self, server: _Server) -> RegisteredServer:
        age = round(self._clock() - server.last_heartbeat, 3)
        state, alive = server.state, not self._death_reason(server)
        return RegisteredServer(state.url, state.instance_id, alive, age, state.sessions, server.free, state.leases)

    def _forget(self, instance: str, reason: str) -> None:
        del self._servers[instance]
        self._ended[instance] = reason
        log.info("%s", reason)
        if len(self._ended) > MAX_ENDED_INSTANCES:
            self._ended.popitem(last=False)
