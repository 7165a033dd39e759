"""Browser sessions on the nodes of a farm, of this machine or of others.

    async with BrowserClient("http://router:8700", token) as browsers, browsers.session() as session:
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
from megatron_webrl.config.browser_checks import parse_farm_addresses
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.farm import protocol
from megatron_webrl.farm.http_client import (
    BrowserBusy,
    HttpClient,
    LeaseLost,
    RequestRejected,
    ServerUnreachable,
    backoff_delays,
    wait_until_set,
)
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.types import Action, Observation, Task

log = logging.getLogger(__name__)

NETWORK_MARGIN_SECONDS = 15.0  # for an operation beyond its own limit: the way there and back, and what the node adds
REQUEST_TIMEOUT_SECONDS = 15.0  # of one short request: a lease, a renewal, a release, the state of a node
SUSPECT_SECONDS = 5.0  # an address that failed is asked last for so long
_lease_adapter, _state_adapter = TypeAdapter(protocol.Lease), TypeAdapter(protocol.ServerState)
_lease_state_adapter, _router_adapter = TypeAdapter(protocol.LeaseState), TypeAdapter(protocol.RouterState)
T = TypeVar("T")

AddressProvider = Callable[[], Sequence[str]]
"""The addresses at this moment, such as those of nodes that may be started again."""


class BrowserClient:
    """Leases sessions of the nodes, or through the routers, at some addresses, and spreads them over these.

    A session is leased when it is asked for, its lease renewed in the background, and released at the end. What may be
    repeated is: asking for a place, renewals, questions about the state. Steps never are.
    """

    def __init__(
        self, addresses: str | AddressProvider, token: str | None = None, *, step_seconds: float = 120.0,
        wait_seconds: float = 600.0, lease_seconds: float | None = None, spec: protocol.SessionSpec | None = None, owner: str = "",
    ) -> None:  # fmt: skip
        """`addresses`: http://host:port, several separated by commas. `token`: None takes it from the environment.

        Limits: `step_seconds` of a reset or step, `wait_seconds` of waiting for a place. `lease_seconds`: lifetime of a
        lease, None leaves it to the node. With `view` a node whose sessions look otherwise is refused. `owner` is for
        people who read a node's list. Raises ConfigError for what is no address.
        """
        if isinstance(addresses, str):
            fixed = parse_farm_addresses(addresses)
            self._addresses: AddressProvider = lambda: fixed
        else:
            self._addresses = addresses
        self._token = token if token is not None else os.environ.get(protocol.TOKEN_VARIABLE)
        self._operation_seconds, self._wait_seconds = step_seconds + NETWORK_MARGIN_SECONDS, wait_seconds
        self._request = protocol.LeaseRequest(lease_seconds, owner)
        self._view = spec
        self._known: set[str] = set()  # nodes that are there, with sessions that look as they should
        self._held: Counter[str] = Counter()  # leases by the address that gave them
        self._suspects: dict[str, float] = {}  # until when
        self._released = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self._calls: HttpClient | None = None

    async def __aenter__(self) -> BrowserClient:
        self._calls = HttpClient(self._token)
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self._background:  # releases under way: each has a limit of its own
            await asyncio.gather(*self._background, return_exceptions=True)
        if self._calls is not None:
            await self._calls.close()
            self._calls = None

    @property
    def http(self) -> HttpClient:
        """The connections."""
        assert self._calls is not None, "BrowserClient is a context manager: async with BrowserClient(...) as browsers"
        return self._calls

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """A fresh session for one episode. Raises BrowserError if there is no place in time, ConfigError."""
        session = RemoteSession(self, *await self._lease(), self._operation_seconds)
        try:
            yield session
        finally:
            await asyncio.shield(self._do(session.close()))

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until one of the addresses answers. Raises BrowserError if none does within `seconds`.

        Raises ConfigError if the token is refused, or the sessions of a node look otherwise than expected.
        """
        deadline, rising = time.monotonic() + seconds, backoff_delays()
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
                raise ServerUnreachable(f"no browser farm within {seconds:.0f} s: {problems[-1]}")
            await asyncio.sleep(pause)

    async def server_state(self, server: str) -> protocol.ServerState:
        """What a node says of itself. Raises BrowserError, ConfigError."""
        return parse_response(_state_adapter, await self._state(server), server)

    async def _nodes_at(self, address: str) -> list[str]:
        """The live nodes behind a router, or the one node that it is."""
        body = await self._state(address)
        try:
            return [node.url for node in protocol.load(_router_adapter, body).servers if node.alive]
        except protocol.ProtocolError:
            return [parse_response(_state_adapter, body, address).url]

    async def _state(self, address: str) -> bytes:
        try:
            return await self.http.request("GET", f"{address}{protocol.API_PREFIX}/state", REQUEST_TIMEOUT_SECONDS)
        except RequestRejected as refused:
            raise refused.to_exception() from refused

    async def replace_lease(self, session: RemoteSession) -> tuple[protocol.Lease, str]:
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

    def mark_unreachable(self, session: RemoteSession) -> None:
        """The session's node is not to be asked first for a while, and looked at anew when it is back."""
        self._suspects[session.lease.server] = time.monotonic() + SUSPECT_SECONDS
        self._known.discard(session.lease.server)

    async def _lease(self) -> tuple[protocol.Lease, str]:
        """A lease and the address that gave it, after waiting if need be."""
        deadline, rising = time.monotonic() + self._wait_seconds, backoff_delays()
        while True:
            asked, problem, after = self._order(), "no node is up", 0.0
            for address in asked:
                asking = self._do(self._ask(address))
                try:
                    lease = await asyncio.shield(asking)
                except asyncio.CancelledError:
                    asking.add_done_callback(self._unwanted)
                    raise
                except RequestRejected as refused:
                    if refused.status != protocol.STATUS_BUSY:
                        raise refused.to_exception() from refused
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

    async def _ask(self, address: str) -> protocol.Lease:
        url = f"{address}{protocol.API_PREFIX}/leases"
        body = await self.http.request("POST", url, REQUEST_TIMEOUT_SECONDS, protocol.dump(self._request))
        lease = parse_response(_lease_adapter, body, address)
        try:
            await self._look_at(lease.server)
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
        found = (await self.server_state(node)).spec
        if self._view is not None and (different := found.differences(self._view)):
            raise ConfigError(
                f"the node {node} has {different}; start it with the settings of the run, or give the run its"
            )
        self._known.add(node)

    async def _drop(self, lease: protocol.Lease) -> None:
        try:
            await self.http.request("DELETE", lease_url(lease), REQUEST_TIMEOUT_SECONDS)
        except (RequestRejected, BrowserError) as error:
            log.debug("a lease ended without its node: %s", error)

    def _unwanted(self, asked: asyncio.Task[protocol.Lease]) -> None:
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

    def __init__(self, browsers: BrowserClient, lease: protocol.Lease, address: str, seconds: float) -> None:
        self.task: Task | None = None
        self.lease, self.address = lease, address
        self._browsers, self._seconds = browsers, seconds
        self._heard = time.monotonic()  # when a request was sent that the node has answered
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def reset(self, task: Task | protocol.ResetRequest) -> Observation:
        """Open the task's page; `instruction` is set. A dead node is replaced, once. Raises BrowserError, ValueError.

        ValueError is for a task that the node does not know. A node asked by protocol.Reset tells the task.
        """
        if isinstance(task, Task):
            self.task = task
            return await self._reset(protocol.ResetRequest(task=task))
        seen = await self._reset(task)
        self.task = (await self.lease_state()).task
        return seen

    async def _reset(self, asked: protocol.ResetRequest) -> Observation:
        body = protocol.dump(asked)
        try:
            return await self._observation("reset", body)
        except (ServerUnreachable, LeaseLost) as error:
            log.warning("%s; the episode begins again elsewhere", error)
            self._keeping.cancel()
            self.lease, self.address = await self._browsers.replace_lease(self)
            self._keeping = asyncio.get_running_loop().create_task(self._keep())
            return await self._observation("reset", body)

    async def step(self, action: Action) -> Observation:
        """Carry out an action and wait until the page has come to rest.

        What the page does not allow is told in Observation.error, and the episode goes on. Raises BrowserError,
        ValueError for an action that lacks what its kind needs or comes before the reset.
        """
        return await self._observation("step", protocol.dump(action))

    async def demonstration(self, premature_submit: bool = False) -> Action:
        """What the task's script would do next; `hasty`: what it would do if it submitted too early.

        Raises OracleError, also where there is no script, BrowserError.
        """
        try:
            body = await self._call(
                "GET", "/demonstration?premature_submit=true" if premature_submit else "/demonstration"
            )
        except RequestRejected as refused:
            if refused.status in (404, 409):
                raise ScriptedPolicyError(refused.error.error) from refused
            raise refused.to_exception() from refused
        return parse_response(protocol.action_adapter, body, self.lease.server)

    async def lease_state(self) -> protocol.LeaseState:
        """What the node knows of the lease. Raises BrowserError."""
        try:
            return parse_response(_lease_state_adapter, await self._call("GET", ""), self.lease.server)
        except RequestRejected as refused:
            raise refused.to_exception() from refused

    async def spec(self) -> protocol.SessionSpec:
        """What the node's sessions show and can do. Raises BrowserError."""
        return (await self._browsers.server_state(self.lease.server)).spec

    async def close(self) -> None:
        """Give the lease back. Called by `Browsers.session`."""
        self._keeping.cancel()
        await self._browsers.release(self)

    async def _observation(self, operation: str, body: bytes) -> Observation:
        try:
            return protocol.decode_observation(
                await self._call("POST", f"/{operation}", body, protocol.OBSERVATION_MEDIA_TYPE)
            )
        except RequestRejected as refused:
            raise refused.to_exception() from refused
        except protocol.ProtocolError as error:
            raise BrowserError(f"{self.lease.server} sent what is no observation: {error}") from error

    async def _call(self, method: str, path: str, body: bytes | None = None, accept: str = "application/json") -> bytes:
        sent = time.monotonic()
        try:
            answer = await self._browsers.http.request(
                method, lease_url(self.lease) + path, self._seconds, body, accept
            )
        except ServerUnreachable:
            self._browsers.mark_unreachable(self)
            raise
        self._heard = sent
        return answer

    async def _keep(self) -> None:
        """Renew the lease whenever a third of its life has passed without a request."""
        third = self.lease.seconds / 3
        rising = backoff_delays()
        while True:
            await asyncio.sleep(max(0.0, self._heard + third - time.monotonic()))
            if time.monotonic() < self._heard + third:
                continue  # a request was answered meanwhile
            sent = time.monotonic()
            try:
                await self._browsers.http.request(
                    "POST", f"{lease_url(self.lease)}/renew", min(third, REQUEST_TIMEOUT_SECONDS)
                )
            except RequestRejected as refused:
                if refused.status < 500:
                    log.warning("the lease of %s cannot be renewed: %s", self.task and self.task.id, refused)
                    return  # the next operation will say so
            except BrowserCrashed as error:
                log.warning("the lease of %s cannot be renewed: %s", self.task and self.task.id, error)
            except BrowserError as error:
                log.info("%s; trying again", error)
            else:
                self._heard, rising = sent, backoff_delays()
                continue
            if sent > self._heard + self.lease.seconds:
                return
            await asyncio.sleep(next(rising))


def lease_url(lease: protocol.Lease) -> str:
    """Where requests about a lease go."""
    return f"{lease.server}{protocol.API_PREFIX}/leases/{quote(lease.id, safe='')}"


def parse_response(adapter: TypeAdapter[T], body: bytes, sender: str) -> T:
    """The value in an answer of `whom`. Raises BrowserError."""
    try:
        return protocol.load(adapter, body)
    except protocol.ProtocolError as error:
        raise BrowserError(f"{sender} sent what cannot be read: {error}") from error
