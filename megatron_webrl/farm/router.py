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

from megatron_webrl.farm.leases import NoPlace, NotHeld
from megatron_webrl.farm.measures import RouterMeasures
from megatron_webrl.farm.opening import BadInput
from megatron_webrl.farm.wire import (
    BUSY,
    PREFIX,
    Error,
    KnownNode,
    Lease,
    LeaseRequest,
    NodeState,
    RouterState,
    WireError,
    dump,
    load,
)  # fmt: skip

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
LOST_SECONDS = 6.0  # without an announcement, after which a node is taken for dead
FORGOTTEN_SECONDS = 600.0
REMEMBERED = 1024  # starts of nodes that are over, to say what became of their leases
ASK_SECONDS, CONNECT_SECONDS = 20.0, 2.0
CONNECTIONS, CONNECTIONS_PER_NODE = 512, 64

_lease, _error = TypeAdapter(Lease), TypeAdapter(Error)


class Unsettled(Exception):
    """What cannot be told yet; the message is one sentence."""


@dataclass
class _Known:
    """A node since it was started."""

    state: NodeState
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
        self.measures = RouterMeasures()
        self.measures.watch(self.state)

    async def __aenter__(self) -> Router:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        self._client = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, limit_per_host=CONNECTIONS_PER_NODE),
            timeout=aiohttp.ClientTimeout(total=ASK_SECONDS, sock_connect=CONNECT_SECONDS),
        )
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def announce(self, state: NodeState) -> None:
        """Hear of a node. Raises BadInput."""
        if not state.url.startswith(("http://", "https://")) or not state.boot or "-" in state.boot:
            raise BadInput(f"url, boot: {state.url[:80]!r} with {state.boot[:80]!r} is no node")
        for boot, other in list(self._nodes.items()):
            if other.state.url == state.url and boot != state.boot:
                self._forget(boot, f"the node {state.url} has been restarted")
            elif self._clock() - other.heard > FORGOTTEN_SECONDS:
                self._forget(boot, f"the node {other.state.url} has not been heard of for {FORGOTTEN_SECONDS:g} s")
        known = self._nodes.get(state.boot)
        if known is None:
            log.info("node %s with %d sessions, %d leased", state.url, state.sessions, len(state.leases))
            known = self._nodes[state.boot] = _Known(state, self._clock(), state.free)
        # What is being placed may or may not be in the announcement; to count it twice is the safe side.
        known.state, known.heard, known.lost = state, self._clock(), None
        known.free = max(0, state.free - known.asked)

    async def place(self, asked: LeaseRequest) -> Lease:
        """A lease on the node with the most free places. Raises NoPlace, BadInput."""
        tried: set[str] = set()
        while True:
            open_nodes = [node for node in self._alive() if node.free > 0 and node.state.boot not in tried]
            if not open_nodes:
                self.measures.refused.inc()
                raise NoPlace(self._taken())
            node = max(open_nodes, key=lambda node: (node.free, random.random()))
            tried.add(node.state.boot)
            lease = await self._ask(node, asked)
            if lease is not None:
                self.measures.placed.inc()
                return lease

    def node_of(self, lease: str) -> str:
        """Address of the node that gave the lease. Raises NotHeld, Unsettled."""
        boot = lease.partition("-")[0]
        known = self._nodes.get(boot)
        if known is not None:
            if reason := self._dead(known):
                raise NotHeld(f"the node {known.state.url} {reason}; its leases are lost")
            return known.state.url
        if boot in self._over:
            raise NotHeld(f"{self._over[boot]}; its leases are lost")
        if self._clock() - self._started < LOST_SECONDS:
            raise Unsettled("the router has just started and has not heard of this lease's node yet")
        raise NotHeld("no node of this lease is known")

    def state(self) -> RouterState:
        """All that is known."""
        alive = self._alive()
        return RouterState(
            sessions=sum(node.state.sessions for node in alive),
            free=sum(node.free for node in alive),
            leases=sum(len(node.state.leases) for node in alive),
            nodes=tuple(self._described(node) for node in self._nodes.values()),
        )

    def environments(self) -> dict[str, tuple[str, ...]]:
        """What some live node can open, by source."""
        found: dict[str, set[str]] = {}
        for node in self._alive():
            for source, names in node.state.sources.items():
                found.setdefault(source, set()).update(names)
        return {source: tuple(sorted(names)) for source, names in found.items()}

    async def check(self) -> str | None:
        """Why no lease could be had even if nobody held one, if that is so."""
        return None if self._alive() else "no node has announced itself lately"

    async def _ask(self, node: _Known, asked: LeaseRequest) -> Lease | None:
        """The node's lease; None if it gives none. Raises BadInput."""
        assert self._client is not None, "the router is entered before it places leases"
        node.free -= 1
        node.asked += 1
        try:
            async with self._client.post(f"{node.state.url}{PREFIX}/leases", data=dump(asked)) as answer:
                body = await answer.read()
                if answer.status == 201:
                    return load(_lease, body)
                if answer.status == BUSY:
                    node.free = 0  # until it says otherwise
                    return None
                if answer.status == 400:
                    raise BadInput(load(_error, body).error)
                log.error("node %s answers a lease request with status %d", node.state.url, answer.status)
        except aiohttp.ClientConnectorError:
            node.lost = "refuses connections"
            log.warning("node %s refuses connections; it is taken for dead", node.state.url)
        except (aiohttp.ClientError, TimeoutError, WireError) as error:
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
        return node.lost or (f"has not been heard of for {silent:.1f} s" if silent > LOST_SECONDS else None)

    def _taken(self) -> str:
        alive = self._alive()
        if not alive:
            return "no node has announced itself lately"
        return f"all {sum(node.state.sessions for node in alive)} sessions of {len(alive)} nodes are leased"

    def _described(self, node: _Known) -> KnownNode:
        silent = round(self._clock() - node.heard, 3)
        state, alive = node.state, not self._dead(node)
        return KnownNode(state.url, state.boot, alive, silent, state.sessions, node.free, state.leases)

    def _forget(self, boot: str, reason: str) -> None:
        del self._nodes[boot]
        self._over[boot] = reason
        log.info("%s", reason)
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
