"""Browser sessions on the nodes of a farm, of this machine or of others.

    async with Browsers("http://router:8700", token) as browsers, browsers.session() as session:
        seen = await session.reset(task)
        seen = await session.step(Action("left_click", coordinate=(500, 500)))

Nothing here needs a browser, Playwright or torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter

from megatron_webrl.browser.errors import BrowserCrashed, BrowserError
from megatron_webrl.config import ConfigError
from megatron_webrl.config_checks import farm_addresses
from megatron_webrl.farm import wire
from megatron_webrl.farm.calls import BrowserBusy, Calls, LeaseLost, NodeGone, Refused, pauses, wait_until_set
from megatron_webrl.tasks.aim import OracleError
from megatron_webrl.types import Action, Observation, Task

log = logging.getLogger(__name__)

WIRE_SECONDS = 15.0  # for an operation beyond its own limit: the way there and back, and what the node adds
STATE_SECONDS = 15.0  # of one short request: a lease, a renewal, a release, the state of a node
SUSPECT_SECONDS = 5.0  # an address that failed is asked last for so long
_lease_adapter, _state_adapter = TypeAdapter(wire.Lease), TypeAdapter(wire.NodeState)
_lease_state_adapter, _router_adapter = TypeAdapter(wire.LeaseState), TypeAdapter(wire.RouterState)
T = TypeVar("T")

Addresses = Callable[[], Sequence[str]]
"""The addresses at this moment, such as those of nodes that may be started again."""


class Browsers:
    """Leases sessions of the nodes, or through the routers, at some addresses, and spreads them over these.

    A session is leased when it is asked for, its lease renewed in the background, and released at the end. What may be
    repeated is: asking for a place, renewals, questions about the state. Steps never are.
    """

    def __init__(
        self, addresses: str | Addresses, token: str | None = None, *, step_seconds: float = 120.0,
        wait_seconds: float = 600.0, lease_seconds: float | None = None, view: wire.View | None = None, owner: str = "",
    ) -> None:  # fmt: skip
        """`addresses`: http://host:port, several separated by commas. `token`: None takes it from the environment.

        Limits: `step_seconds` of a reset or step, `wait_seconds` of waiting for a place. `lease_seconds`: lifetime of a
        lease, None leaves it to the node. With `view` a node whose sessions look otherwise is refused. `owner` is for
        people who read a node's list. Raises ConfigError for what is no address.
        """
        if isinstance(addresses, str):
            fixed = farm_addresses(addresses)
            self._addresses: Addresses = lambda: fixed
        else:
            self._addresses = addresses
        self._token = token if token is not None else os.environ.get(wire.TOKEN_VARIABLE)
        self._operation_seconds, self._wait_seconds = step_seconds + WIRE_SECONDS, wait_seconds
        self._request = wire.LeaseRequest(lease_seconds, owner)
        self._view = view
        self._known: set[str] = set()  # nodes that are there, with sessions that look as they should
        self._held: Counter[str] = Counter()  # leases by the address that gave them
        self._suspects: dict[str, float] = {}  # until when
        self._released = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self._calls: Calls | None = None

    async def __aenter__(self) -> Browsers:
        self._calls = Calls(self._token)
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self._background:  # releases under way: each has a limit of its own
            await asyncio.gather(*self._background, return_exceptions=True)
        if self._calls is not None:
            await self._calls.close()
            self._calls = None

    @property
    def calls(self) -> Calls:
        """The connections."""
        assert self._calls is not None, "Browsers is a context manager: async with Browsers(...) as browsers"
        return self._calls

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """A fresh session for one episode. Raises BrowserError if there is no place in time, ConfigError."""
        session = RemoteSession(self, *await self._lease(), self._operation_seconds)
        try:
            yield session
        finally:
            await asyncio.shield(self._do(session.close()))

    async def check(self, seconds: float) -> None:
        """Wait until one of the addresses answers. Raises BrowserError if none does within `seconds`.

        Raises ConfigError if the token is refused, or the sessions of a node look otherwise than expected.
        """
        deadline, rising = time.monotonic() + seconds, pauses()
        while True:
            answered, problems = 0, ["no node is up"]
            for address in self._addresses():
                try:
                    for node in await self._nodes_at(address):
                        await self._look_at(node)
                    answered += 1
                except BrowserError as error:
                    problems.append(str(error))
            if answered:
                return
            pause = next(rising)
            if time.monotonic() + pause > deadline:
                raise NodeGone(f"no browser farm within {seconds:.0f} s: {problems[-1]}")
            await asyncio.sleep(pause)

    async def state(self, node: str) -> wire.NodeState:
        """What a node says of itself. Raises BrowserError, ConfigError."""
        return parsed(_state_adapter, await self._state(node), node)

    async def _nodes_at(self, address: str) -> list[str]:
        """The live nodes behind a router, or the one node that it is."""
        body = await self._state(address)
        try:
            return [node.url for node in wire.load(_router_adapter, body).nodes if node.alive]
        except wire.WireError:
            return [parsed(_state_adapter, body, address).url]

    async def _state(self, address: str) -> bytes:
        try:
            return await self.calls.call("GET", f"{address}{wire.PREFIX}/state", STATE_SECONDS)
        except Refused as refused:
            raise refused.failure() from refused

    async def another(self, session: RemoteSession) -> tuple[wire.Lease, str]:
        """A lease in place of one whose node is gone, of a session that goes on."""
        found = await self._lease()
        self._held[session.address] -= 1
        return found

    async def release(self, session: RemoteSession) -> None:
        """Give a session's lease back; one that is gone already is none to give back."""
        self._held[session.address] -= 1
        try:
            await self._drop(session.lease)
        finally:
            self._released.set()  # whoever waits for a place need not wait for the node's next answer
            self._released.clear()

    def gone(self, session: RemoteSession) -> None:
        """The session's node is not to be asked first for a while, and looked at anew when it is back."""
        self._suspects[session.lease.node] = time.monotonic() + SUSPECT_SECONDS
        self._known.discard(session.lease.node)

    async def _lease(self) -> tuple[wire.Lease, str]:
        """A lease and the address that gave it, after waiting if need be."""
        deadline, rising = time.monotonic() + self._wait_seconds, pauses()
        while True:
            asked, problem, after = self._order(), "no node is up", 0.0
            for address in asked:
                asking = self._do(self._ask(address))
                try:
                    lease = await asyncio.shield(asking)
                except asyncio.CancelledError:
                    asking.add_done_callback(self._unwanted)
                    raise
                except Refused as refused:
                    if refused.status != wire.BUSY:
                        raise refused.failure() from refused
                    problem, after = str(refused), max(after, refused.retry_after or 0.0)
                except BrowserError as error:
                    self._suspects[address] = time.monotonic() + SUSPECT_SECONDS
                    problem = str(error)
                else:
                    self._held[address] += 1
                    return lease, address
            pause = max(next(rising), after * random.uniform(1.0, 1.5))
            if time.monotonic() + pause > deadline:
                whom = ", ".join(asked) or "nodes that are started"
                raise BrowserBusy(f"no browser within {self._wait_seconds:.0f} s; waited for {whom}; last: {problem}")
            await wait_until_set(self._released, pause)

    def _order(self) -> list[str]:
        """The addresses, best first: those that work, with few of our leases, in turns."""
        now = time.monotonic()
        return sorted(
            self._addresses(), key=lambda one: (self._suspects.get(one, 0.0) > now, self._held[one], random.random())
        )

    async def _ask(self, address: str) -> wire.Lease:
        url = f"{address}{wire.PREFIX}/leases"
        body = await self.calls.call("POST", url, STATE_SECONDS, wire.dump(self._request))
        lease = parsed(_lease_adapter, body, address)
        try:
            await self._look_at(lease.node)
        except BaseException:
            await self._drop(lease)
            raise
        return lease

    async def _look_at(self, node: str) -> None:
        """See that a node is there, and refuse it if its sessions are not what is expected; once, and again when it was
        gone: a router may not have noticed yet. Raises BrowserError, ConfigError.
        """
        if node in self._known:
            return
        found = (await self.state(node)).view
        if self._view is not None and (different := found.differences(self._view)):
            raise ConfigError(
                f"the node {node} has {different}; start it with the settings of the run, or give the run its"
            )
        self._known.add(node)

    async def _drop(self, lease: wire.Lease) -> None:
        try:
            await self.calls.call("DELETE", lease_url(lease), STATE_SECONDS)
        except (Refused, BrowserError) as error:
            log.debug("a lease ended without its node: %s", error)

    def _unwanted(self, asked: asyncio.Task[wire.Lease]) -> None:
        """Who asked for the lease was cancelled meanwhile."""
        if not asked.cancelled() and asked.exception() is None and self._calls is not None:
            self._do(self._drop(asked.result()))

    def _do(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class RemoteSession:
    """Life: reset -> step, step, ...; `Browsers.session` leases and releases it.

    Every operation ends within its limit or raises a BrowserError; after one the session is of no more use.
    """

    def __init__(self, browsers: Browsers, lease: wire.Lease, address: str, seconds: float) -> None:
        self.task: Task | None = None
        self.lease, self.address = lease, address
        self._browsers, self._seconds = browsers, seconds
        self._heard = time.monotonic()  # when a request was sent that the node has answered
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def reset(self, task: Task | wire.Reset) -> Observation:
        """Open the task's page; `instruction` is set. A dead node is replaced, once. Raises BrowserError, ValueError.

        ValueError is for a task that the node does not know. A node asked by wire.Reset tells the task.
        """
        if isinstance(task, Task):
            self.task = task
            return await self._reset(wire.Reset(task=task))
        seen = await self._reset(task)
        self.task = (await self.state()).task
        return seen

    async def _reset(self, asked: wire.Reset) -> Observation:
        body = wire.dump(asked)
        try:
            return await self._observation("reset", body)
        except (NodeGone, LeaseLost) as error:
            log.warning("%s; the episode begins again elsewhere", error)
            self._keeping.cancel()
            self.lease, self.address = await self._browsers.another(self)
            self._keeping = asyncio.get_running_loop().create_task(self._keep())
            return await self._observation("reset", body)

    async def step(self, action: Action) -> Observation:
        """Carry out an action and wait until the page has come to rest.

        What the page does not allow is told in Observation.error, and the episode goes on. Raises BrowserError,
        ValueError for an action that lacks what its kind needs or comes before the reset.
        """
        return await self._observation("step", wire.dump(action))

    async def demonstration(self, hasty: bool = False) -> Action:
        """What the task's script would do next; `hasty`: what it would do if it submitted too early.

        Raises OracleError, also where there is no script, BrowserError.
        """
        try:
            body = await self._call("GET", "/demonstration?hasty=true" if hasty else "/demonstration")
        except Refused as refused:
            if refused.status in (404, 409):
                raise OracleError(refused.error.error) from refused
            raise refused.failure() from refused
        return parsed(wire.action_adapter, body, self.lease.node)

    async def state(self) -> wire.LeaseState:
        """What the node knows of the lease. Raises BrowserError."""
        try:
            return parsed(_lease_state_adapter, await self._call("GET", ""), self.lease.node)
        except Refused as refused:
            raise refused.failure() from refused

    async def view(self) -> wire.View:
        """What the node's sessions show and can do. Raises BrowserError."""
        return (await self._browsers.state(self.lease.node)).view

    async def close(self) -> None:
        """Give the lease back. Called by `Browsers.session`."""
        self._keeping.cancel()
        await self._browsers.release(self)

    async def _observation(self, operation: str, body: bytes) -> Observation:
        try:
            return wire.unframe(await self._call("POST", f"/{operation}", body, wire.FRAME))
        except Refused as refused:
            raise refused.failure() from refused
        except wire.WireError as error:
            raise BrowserError(f"{self.lease.node} sent what is no observation: {error}") from error

    async def _call(self, method: str, path: str, body: bytes | None = None, accept: str = "application/json") -> bytes:
        sent = time.monotonic()
        try:
            answer = await self._browsers.calls.call(method, lease_url(self.lease) + path, self._seconds, body, accept)
        except NodeGone:
            self._browsers.gone(self)
            raise
        self._heard = sent
        return answer

    async def _keep(self) -> None:
        """Renew the lease whenever a third of its life has passed without a request."""
        third = self.lease.seconds / 3
        rising = pauses()
        while True:
            await asyncio.sleep(max(0.0, self._heard + third - time.monotonic()))
            if time.monotonic() < self._heard + third:
                continue  # a request was answered meanwhile
            sent = time.monotonic()
            try:
                await self._browsers.calls.call("POST", f"{lease_url(self.lease)}/renew", min(third, STATE_SECONDS))
            except Refused as refused:
                if refused.status < 500:
                    log.warning("the lease of %s cannot be renewed: %s", self.task and self.task.id, refused)
                    return  # the next operation will say so
            except BrowserCrashed as error:
                log.warning("the lease of %s cannot be renewed: %s", self.task and self.task.id, error)
            except BrowserError as error:
                log.info("%s; trying again", error)
            else:
                self._heard, rising = sent, pauses()
                continue
            if sent > self._heard + self.lease.seconds:
                return
            await asyncio.sleep(next(rising))


def lease_url(lease: wire.Lease) -> str:
    """Where requests about a lease go."""
    return f"{lease.node}{wire.PREFIX}/leases/{quote(lease.id, safe='')}"


def parsed(adapter: TypeAdapter[T], body: bytes, whom: str) -> T:
    """The value in an answer of `whom`. Raises BrowserError."""
    try:
        return wire.load(adapter, body)
    except wire.WireError as error:
        raise BrowserError(f"{whom} sent what cannot be read: {error}") from error
