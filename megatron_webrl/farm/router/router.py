"""The front of many nodes: places leases, and knows which node holds which. It holds nothing that nodes do not tell it
again within seconds, so it may be restarted at any time.
"""

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

from megatron_webrl.farm.leases import LeaseExpired, NoCapacity
from megatron_webrl.farm.metrics import RouterMetrics
from megatron_webrl.farm.protocol import (
    API_PREFIX,
    STATUS_BUSY,
    ErrorResponse,
    Lease,
    LeaseRequest,
    ProtocolError,
    RegisteredServer,
    RouterState,
    ServerState,
    dump,
    load,
)  # fmt: skip
from megatron_webrl.farm.request_validation import InvalidRequest

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
HEARTBEAT_TIMEOUT_SECONDS = 6.0  # without an announcement, after which a node is taken for dead
FORGET_SERVER_SECONDS = 600.0
MAX_ENDED_INSTANCES = 1024  # starts of nodes that are over, to say what became of their leases
LEASE_REQUEST_TIMEOUT_SECONDS, CONNECT_TIMEOUT_SECONDS = 20.0, 2.0
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SERVER = 512, 64

_lease, _error = TypeAdapter(Lease), TypeAdapter(ErrorResponse)


class RouterStarting(Exception):
    """What cannot be told yet; the message is one sentence."""


@dataclass
class _Known:
    """A node since it was started."""

    state: ServerState
    heard: float
    free: int  # as announced, less what has been placed since
    asked: int = 0  # placements under way
    lost: str | None = None  # why it is taken for dead although it was heard of lately


class Router:
    """`async with Router(token)`: nodes announce themselves, leases are placed, requests about leases sent on."""

    def __init__(self, token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`token` is that of the nodes, too."""
        self._token, self._clock = token, clock
        self._started = clock()
        self._nodes: dict[str, _Known] = {}  # by boot, with which ids of leases begin
        self._over: OrderedDict[str, str] = OrderedDict()  # what became of earlier ones
        self._client: aiohttp.ClientSession | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._ticked: float | None = None
        self.metrics = RouterMetrics()
        self.metrics.register_gauges(self.state)

    async def __aenter__(self) -> Router:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        self._client = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, limit_per_host=MAX_CONNECTIONS_PER_SERVER),
            timeout=aiohttp.ClientTimeout(total=LEASE_REQUEST_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS),
        )
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def register(self, state: ServerState) -> None:
        """Hear of a node. Raises BadInput."""
        if not state.url.startswith(("http://", "https://")) or not state.instance_id or "-" in state.instance_id:
            raise InvalidRequest(f"url, instance_id: {state.url[:80]!r} with {state.instance_id[:80]!r} is no node")
        for boot, other in list(self._nodes.items()):
            if other.state.url == state.url and boot != state.instance_id:
                self._forget(boot, f"the node {state.url} has been restarted")
            elif self._clock() - other.heard > FORGET_SERVER_SECONDS:
                self._forget(boot, f"the node {other.state.url} has not been heard of for {FORGET_SERVER_SECONDS:g} s")
        known = self._nodes.get(state.instance_id)
        if known is None:
            log.info("node %s with %d sessions, %d leased", state.url, state.sessions, len(state.leases))
            known = self._nodes[state.instance_id] = _Known(state, self._clock(), state.free)
        # What is being placed may or may not be in the announcement; to count it twice is the safe side.
        known.state, known.heard, known.lost = state, self._clock(), None
        known.free = max(0, state.free - known.asked)

    async def place_lease(self, request: LeaseRequest) -> Lease:
        """A lease on the node with the most free places. Raises NoPlace, BadInput."""
        tried: set[str] = set()
        while True:
            open_nodes = [node for node in self._alive() if node.free > 0 and node.state.instance_id not in tried]
            if not open_nodes:
                self.metrics.refused_leases.inc()
                raise NoCapacity(self._taken())
            node = max(open_nodes, key=lambda node: (node.free, random.random()))
            tried.add(node.state.instance_id)
            lease = await self._ask(node, request)
            if lease is not None:
                self.metrics.placed_leases.inc()
                return lease

    def server_of(self, lease_id: str) -> str:
        """Address of the node that gave the lease. Raises NotHeld, Unsettled."""
        boot = lease_id.partition("-")[0]
        known = self._nodes.get(boot)
        if known is not None:
            if reason := self._dead(known):
                raise LeaseExpired(f"the node {known.state.url} {reason}; its leases are lost")
            return known.state.url
        if boot in self._over:
            raise LeaseExpired(f"{self._over[boot]}; its leases are lost")
        if self._clock() - self._started < HEARTBEAT_TIMEOUT_SECONDS:
            raise RouterStarting("the router has just started and has not heard of this lease's node yet")
        raise LeaseExpired("no node of this lease is known")

    def state(self) -> RouterState:
        """All that is known."""
        alive = self._alive()
        return RouterState(
            sessions=sum(node.state.sessions for node in alive),
            free=sum(node.free for node in alive),
            leases=sum(len(node.state.leases) for node in alive),
            servers=tuple(self._described(node) for node in self._nodes.values()),
        )

    def environments(self) -> dict[str, tuple[str, ...]]:
        """What some live node can open, by source."""
        found: dict[str, set[str]] = {}
        for node in self._alive():
            for source, names in node.state.sources.items():
                found.setdefault(source, set()).update(names)
        return {source: tuple(sorted(names)) for source, names in found.items()}

    async def health_problem(self) -> str | None:
        """Why no lease could be had even if nobody held one, if that is so."""
        return None if self._alive() else "no node has announced itself lately"

    async def _ask(self, node: _Known, asked: LeaseRequest) -> Lease | None:
        """The node's lease; None if it gives none. Raises BadInput."""
        assert self._client is not None, "the router is entered before it places leases"
        node.free -= 1
        node.asked += 1
        try:
            async with self._client.post(f"{node.state.url}{API_PREFIX}/leases", data=dump(asked)) as answer:
                body = await answer.read()
                if answer.status == 201:
                    return load(_lease, body)
                if answer.status == STATUS_BUSY:
                    node.free = 0  # until it says otherwise
                    return None
                if answer.status == 400:
                    raise InvalidRequest(load(_error, body).error)
                log.error("node %s answers a lease request with status %d", node.state.url, answer.status)
        except aiohttp.ClientConnectorError:
            node.lost = "refuses connections"
            log.warning("node %s refuses connections; it is taken for dead", node.state.url)
        except (aiohttp.ClientError, TimeoutError, ProtocolError) as error:
            log.warning("node %s gave no lease: %s: %s", node.state.url, type(error).__name__, error)
        finally:
            node.asked -= 1
        return None

    def _alive(self) -> list[_Known]:
        return [node for node in self._nodes.values() if not self._dead(node)]

    async def _tick(self) -> None:
        """What is said while this process does not run, for want of a processor or stopped, is heard too late: such
        time counts as nobody's silence.
        """
        while True:
            self._ticked = self._clock()
            await asyncio.sleep(TICK_SECONDS)
            late = self._late()
            for node in self._nodes.values():
                node.heard = min(node.heard + late, self._clock())

    def _late(self) -> float:
        """How late the next tick is."""
        return 0.0 if self._ticked is None else max(0.0, self._clock() - self._ticked - TICK_SECONDS)

    def _dead(self, node: _Known) -> str | None:
        silent = self._clock() - node.heard - self._late()
        return node.lost or (
            f"has not been heard of for {silent:.1f} s" if silent > HEARTBEAT_TIMEOUT_SECONDS else None
        )

    def _taken(self) -> str:
        alive = self._alive()
        if not alive:
            return "no node has announced itself lately"
        return f"all {sum(node.state.sessions for node in alive)} sessions of {len(alive)} nodes are leased"

    def _described(self, node: _Known) -> RegisteredServer:
        silent = round(self._clock() - node.heard, 3)
        state, alive = node.state, not self._dead(node)
        return RegisteredServer(state.url, state.instance_id, alive, silent, state.sessions, node.free, state.leases)

    def _forget(self, boot: str, reason: str) -> None:
        del self._nodes[boot]
        self._over[boot] = reason
        log.info("%s", reason)
        if len(self._over) > MAX_ENDED_INSTANCES:
            self._over.popitem(last=False)
