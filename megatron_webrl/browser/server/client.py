"""Client of browser servers, on this machine or on a farm. It needs neither a browser nor Playwright or torch.

async with BrowserClient("http://router:8700", token) as browsers, browsers.session() as session:
    observation = await session.reset(task)
    observation = await session.step(Action("left_click", coordinate=(500, 500)))
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from pydantic import TypeAdapter
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay

from megatron_webrl.browser.errors import BrowserCrashed, BrowserError
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.http_client import (
    BACKOFF,
    BrowserBusy,
    HttpClient,
    LeaseLost,
    RequestRejected,
    ServerUnreachable,
    parse_response,
    wait_until_set,
)
from megatron_webrl.config.browser import parse_farm_addresses
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.types import Action, Observation, Task

log = logging.getLogger(__name__)

NETWORK_MARGIN_SECONDS = 15.0  # added to the timeout of an operation: network and overhead of the server
REQUEST_TIMEOUT_SECONDS = 15.0  # of a short request: lease, renewal, release, server state
SUSPECT_SECONDS = 5.0  # an address that failed is tried last for this long
_lease_adapter, _state_adapter = TypeAdapter(protocol.Lease), TypeAdapter(protocol.ServerState)
_lease_state_adapter, _router_adapter = TypeAdapter(protocol.LeaseState), TypeAdapter(protocol.RouterState)

AddressProvider = Callable[[], Sequence[str]]  # returns the current addresses, which change if servers are restarted


class BrowserClient:
    """Leases sessions from servers or routers, balanced over their addresses; renews leases in the background. Requests
    for a lease, renewals and state queries are retried; steps never are.
    """

    def __init__(
        self, addresses: str | AddressProvider, token: str | None = None, *, step_seconds: float = 120.0,
        wait_seconds: float = 600.0, lease_seconds: float | None = None, spec: protocol.SessionSpec | None = None,
        owner: str = "",
    ) -> None:  # fmt: skip
        """`addresses`: http://host:port, separated by commas. `token`: None reads it from the environment. Timeouts:
        `step_seconds` of a reset or step, `wait_seconds` of waiting for a free session. `lease_seconds`: lifetime of a
        lease; None: the server's default. A server whose sessions differ from `spec` is refused. `owner` is shown on
        the server's status page. Raises ConfigError for an invalid address.
        """
        if isinstance(addresses, str):
            fixed = parse_farm_addresses(addresses)
            self._addresses: AddressProvider = lambda: fixed
        else:
            self._addresses = addresses
        self._token = token if token is not None else os.environ.get(protocol.TOKEN_VARIABLE)
        self._operation_seconds, self._wait_seconds = step_seconds + NETWORK_MARGIN_SECONDS, wait_seconds
        self._request = protocol.LeaseRequest(lease_seconds, owner)
        self._spec = spec
        self._checked: set[str] = set()  # reachable servers whose sessions agree with the spec
        self._leases: Counter[str] = Counter()  # number of leases by address
        self._suspect_until: dict[str, float] = {}  # monotonic time by address
        self._released = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self._http: HttpClient | None = None

    async def __aenter__(self) -> BrowserClient:
        self._http = HttpClient(self._token)
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self._background:  # pending releases: each has its own timeout
            await asyncio.gather(*self._background, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
            self._http = None

    @property
    def http(self) -> HttpClient:
        """The HTTP client."""
        assert self._http is not None, "BrowserClient is a context manager: async with BrowserClient(...) as browsers"
        return self._http

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """Lease a session for one episode. Raises BrowserError if none becomes free in time, ConfigError."""
        session = RemoteSession(self, *await self._acquire_lease(), self._operation_seconds)
        try:
            yield session
        finally:
            await asyncio.shield(self._start(session.close()))

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until a server answers. Raises ServerUnreachable after `seconds`; ConfigError: wrong token or spec."""

        async def check_all() -> None:
            answered, problem = 0, "no server has started"
            for address in self._addresses():
                try:
                    for server in await self._servers_at(address):
                        await self._check_server(server)
                    answered += 1
                except BrowserError as error:
                    problem = str(error)
            if not answered:
                raise ServerUnreachable(f"no browser farm within {seconds:.0f} s: {problem}")

        retry = retry_if_exception_type(ServerUnreachable)
        await AsyncRetrying(wait=BACKOFF, stop=stop_before_delay(seconds), retry=retry, reraise=True)(check_all)

    async def server_state(self, server: str) -> protocol.ServerState:
        """The state of a browser server. Raises BrowserError, ConfigError."""
        return parse_response(_state_adapter, await self._state(server), server)

    async def _servers_at(self, address: str) -> list[str]:
        """The live servers of a router, or the browser server at the address itself."""
        body = await self._state(address)
        try:
            return [server.url for server in protocol.load(_router_adapter, body).servers if server.alive]
        except protocol.ProtocolError:
            return [parse_response(_state_adapter, body, address).url]

    async def _state(self, address: str) -> bytes:
        try:
            return await self.http.request("GET", f"{address}{protocol.API_PREFIX}/state", REQUEST_TIMEOUT_SECONDS)
        except RequestRejected as rejected:
            raise rejected.to_exception() from rejected

    async def replace_lease(self, session: RemoteSession) -> tuple[protocol.Lease, str]:
        """A lease and its address for a session whose lease or server was lost."""
        replacement = await self._acquire_lease()
        self._leases[session.address] -= 1
        return replacement

    async def release(self, session: RemoteSession) -> None:
        """Release a session's lease, unless it has ended already."""
        self._leases[session.address] -= 1
        try:
            await self._delete_lease(session.lease)
        finally:
            self._released.set()  # wakes the callers that wait for a free session
            self._released.clear()

    def mark_unreachable(self, session: RemoteSession) -> None:
        """Try the session's server last for a while, and check its spec again when it is back."""
        self._suspect_until[session.lease.server] = time.monotonic() + SUSPECT_SECONDS
        self._checked.discard(session.lease.server)

    async def _acquire_lease(self) -> tuple[protocol.Lease, str]:
        """A lease and its address; waits for a free session. Raises BrowserBusy, ConfigError."""
        return await AsyncRetrying(
            wait=_lease_delay, stop=stop_before_delay(self._wait_seconds), retry=retry_if_exception_type(BrowserBusy),
            sleep=lambda seconds: wait_until_set(self._released, seconds), reraise=True,
        )(self._request_lease_anywhere)  # fmt: skip

    async def _request_lease_anywhere(self) -> tuple[protocol.Lease, str]:
        """Try all addresses once. Raises BrowserBusy if none has a free session."""
        addresses, problem, retry_after = self._sorted_addresses(), "no server has started", 0.0
        for address in addresses:
            request = self._start(self._request_lease(address))
            try:
                lease = await asyncio.shield(request)
            except asyncio.CancelledError:
                request.add_done_callback(self._release_unused)
                raise
            except RequestRejected as rejected:
                if rejected.status != protocol.STATUS_BUSY:
                    raise rejected.to_exception() from rejected
                problem, retry_after = str(rejected), max(retry_after, rejected.retry_after or 0.0)
            except BrowserError as error:
                self._suspect_until[address] = time.monotonic() + SUSPECT_SECONDS
                problem = str(error)
            else:
                self._leases[address] += 1
                return lease, address
        servers = ", ".join(addresses) or "servers to start"
        busy = BrowserBusy(f"no browser within {self._wait_seconds:.0f} s; waited for {servers}; last: {problem}")
        busy.retry_after = retry_after
        raise busy

    def _sorted_addresses(self) -> list[str]:
        """The addresses, best first: working ones with few of this client's leases; ties at random."""
        now = time.monotonic()
        return sorted(
            self._addresses(),
            key=lambda url: (self._suspect_until.get(url, 0.0) > now, self._leases[url], random.random()),
        )

    async def _request_lease(self, address: str) -> protocol.Lease:
        url = f"{address}{protocol.API_PREFIX}/leases"
        body = await self.http.request("POST", url, REQUEST_TIMEOUT_SECONDS, protocol.dump(self._request))
        lease = parse_response(_lease_adapter, body, address)
        try:
            await self._check_server(lease.server)
        except BaseException:
            await self._delete_lease(lease)
            raise
        return lease

    async def _check_server(self, server: str) -> None:
        """Check a server and its spec once, and again after it was unreachable. Raises BrowserError, ConfigError."""
        if server in self._checked:
            return
        spec = (await self.server_state(server)).spec
        if self._spec is not None and (differences := spec.differences(self._spec)):
            raise ConfigError(
                f"browser server {server} has {differences}; start it with the settings of the run, or give the run its"
            )
        self._checked.add(server)

    async def _delete_lease(self, lease: protocol.Lease) -> None:
        try:
            await self.http.request("DELETE", protocol.lease_url(lease), REQUEST_TIMEOUT_SECONDS)
        except (RequestRejected, BrowserError) as error:
            log.debug("lease not released: %s", error)

    def _release_unused(self, request: asyncio.Task[protocol.Lease]) -> None:
        """Release the lease of a request whose caller was cancelled."""
        if not request.cancelled() and request.exception() is None and self._http is not None:
            self._start(self._delete_lease(request.result()))

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class RemoteSession:
    """Life cycle: reset -> step, step, ...; `BrowserClient.session` leases and releases it. Every operation ends
    within its timeout or raises a BrowserError, after which only a reset is possible.
    """

    def __init__(self, browsers: BrowserClient, lease: protocol.Lease, address: str, seconds: float) -> None:
        self.task: Task | None = None
        self.lease, self.address = lease, address
        self._browsers, self._seconds = browsers, seconds
        self._last_contact = self._renewal_sent = time.monotonic()  # sending time of the latest answered request
        self._renewing = asyncio.get_running_loop().create_task(self._keep_lease())

    async def reset(self, task: Task | protocol.ResetRequest) -> Observation:
        """Open the task's page; the observation has an instruction. A dead server is replaced, once. After a
        ResetRequest, `task` is the one that the server made. Raises BrowserError, and ValueError for an unknown task.
        """
        if isinstance(task, Task):
            self.task = task
            return await self._reset(protocol.ResetRequest(task=task))
        observation = await self._reset(task)
        self.task = (await self.lease_state()).task
        return observation

    async def _reset(self, request: protocol.ResetRequest) -> Observation:
        body = protocol.dump(request)
        try:
            return await self._observation("reset", body)
        except (ServerUnreachable, LeaseLost) as error:
            log.warning("%s; restarting the episode on another lease", error)
            self._renewing.cancel()
            self.lease, self.address = await self._browsers.replace_lease(self)
            self._renewing = asyncio.get_running_loop().create_task(self._keep_lease())
            return await self._observation("reset", body)

    async def step(self, action: Action) -> Observation:
        """Execute an action and wait until the page is idle. Observation.error says what the page did not allow. Raises
        BrowserError, and ValueError for an action that lacks a required field or comes before the reset.
        """
        return await self._observation("step", protocol.dump(action))

    async def demonstration(self, premature_submit: bool = False) -> Action:
        """The next action of the task's scripted policy, or with `premature_submit` of one that submits too early.
        Raises ScriptedPolicyError, also if the task has no scripted policy, and BrowserError.
        """
        try:
            body = await self._call("GET", f"/demonstration?premature_submit={str(premature_submit).lower()}")
        except RequestRejected as rejected:
            if rejected.status in (404, 409):
                raise ScriptedPolicyError(rejected.error.error) from rejected
            raise rejected.to_exception() from rejected
        return parse_response(protocol.action_adapter, body, self.lease.server)

    async def lease_state(self) -> protocol.LeaseState:
        """The state of the lease on its server. Raises BrowserError."""
        try:
            return parse_response(_lease_state_adapter, await self._call("GET", ""), self.lease.server)
        except RequestRejected as rejected:
            raise rejected.to_exception() from rejected

    async def spec(self) -> protocol.SessionSpec:
        """The session spec of the lease's server. Raises BrowserError."""
        return (await self._browsers.server_state(self.lease.server)).spec

    async def close(self) -> None:
        """Release the lease. Called by `BrowserClient.session`."""
        self._renewing.cancel()
        await self._browsers.release(self)

    async def _observation(self, operation: str, body: bytes) -> Observation:
        try:
            return protocol.decode_observation(
                await self._call("POST", f"/{operation}", body, protocol.OBSERVATION_MEDIA_TYPE)
            )
        except RequestRejected as rejected:
            raise rejected.to_exception() from rejected
        except protocol.ProtocolError as error:
            raise BrowserError(f"{self.lease.server} sent an invalid observation: {error}") from error

    async def _call(self, method: str, path: str, body: bytes | None = None, accept: str = "application/json") -> bytes:
        sent = time.monotonic()
        try:
            response = await self._browsers.http.request(
                method, protocol.lease_url(self.lease) + path, self._seconds, body, accept
            )
        except ServerUnreachable:
            self._browsers.mark_unreachable(self)
            raise
        self._last_contact = sent
        return response

    async def _keep_lease(self) -> None:
        """Renew the lease whenever a third of its lifetime has passed without a request, until that fails for good."""
        third = self.lease.seconds / 3
        renewal = AsyncRetrying(
            wait=BACKOFF, retry=_is_transient, reraise=True,
            stop=lambda _: self._renewal_sent > self._last_contact + self.lease.seconds,
        )  # fmt: skip
        with suppress(RequestRejected, BrowserError):  # the next operation raises it again
            while True:
                await asyncio.sleep(max(0.0, self._last_contact + third - time.monotonic()))
                await renewal(self._renew_lease, third)

    async def _renew_lease(self, interval: float) -> None:
        """Renew the lease unless a request was answered less than `interval` seconds ago."""
        self._renewal_sent = time.monotonic()
        if self._renewal_sent < self._last_contact + interval:
            return
        timeout = min(interval, REQUEST_TIMEOUT_SECONDS)
        try:
            await self._browsers.http.request("POST", f"{protocol.lease_url(self.lease)}/renew", timeout)
        except (RequestRejected, BrowserError) as error:
            fatal = isinstance(error, BrowserCrashed) or (isinstance(error, RequestRejected) and error.status < 500)
            level = logging.WARNING if fatal else logging.INFO
            log.log(level, "cannot renew the lease of %s: %s", self.task and self.task.id, error)
            raise
        self._last_contact = self._renewal_sent


def _is_transient(attempt: RetryCallState) -> bool:
    """Whether a renewal failed by an error that may go away."""
    error = attempt.outcome.exception() if attempt.outcome else None
    return error.status >= 500 if isinstance(error, RequestRejected) else isinstance(error, BrowserError)


def _lease_delay(attempt: RetryCallState) -> float:
    """Seconds until the next request for a lease: back-off, but no less than the servers ask for."""
    busy = attempt.outcome.exception() if attempt.outcome else None
    asked = busy.retry_after if isinstance(busy, BrowserBusy) else 0.0
    return max(BACKOFF(attempt), asked * random.uniform(1.0, 1.5))
