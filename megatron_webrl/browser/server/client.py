"""Client of browser servers, on this machine or on others. It needs neither a browser nor Playwright or torch.

async with BrowserClient("http://node7:8700,http://node8:8700", token) as browsers, browsers.session() as session:
    observation = await session.reset(task)
    observation = await session.step(Action("left_click", coordinate=(500, 500)))
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp

from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.server import protocol
from megatron_webrl.config.browser import parse_server_addresses
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.access import client_context
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.types import Action, Observation, Task
from megatron_webrl.util import network
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

NETWORK_MARGIN_SECONDS = 15.0  # added to the timeout of an operation: network and overhead of the server
REQUEST_TIMEOUT_SECONDS = 15.0  # of a short request: lease, renewal, release, server state
CONNECT_TIMEOUT_SECONDS = 5.0
AWAY_SECONDS = 5.0  # for which a server that did not answer gets no request for a lease
KEEPALIVE_SECONDS = 10.0  # of idle connections; servers keep theirs longer, lest a closed one looks like a dead server
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 5.0

T = TypeVar("T")
AddressProvider = Callable[[], Sequence[str]]  # returns the current addresses, which change if servers are restarted

_BY_OUTCOME: dict[str, type[BrowserError]] = {
    kind.outcome: kind for kind in (BrowserError, BrowserCrashed, PageCrashed, BrowserTimeout)
}


class ServerUnreachable(BrowserCrashed):
    """The browser server cannot be reached; its browsers count as crashed."""


class LeaseLost(BrowserError):
    """The browser server does not know the lease, or the lease has ended."""

    outcome = "lease_lost"


class BrowserBusy(BrowserError):
    """Every session is leased."""

    outcome = "browser_busy"


class BrowserClient:
    """Leases sessions of browser servers, each from the server with the most free sessions by its latest answer; renews
    leases in the background. Requests for a lease, renewals and state queries are repeated; steps never are.
    """

    def __init__(
        self, addresses: str | AddressProvider, token: str | None = None, *, step_seconds: float = 120.0,
        wait_seconds: float = 600.0, lease_seconds: float = protocol.LEASE_SECONDS,
        spec: protocol.SessionSpec | None = None, owner: str = "",
    ) -> None:  # fmt: skip
        """`addresses`: http://host:port, separated by commas. `token`: None reads it from the environment. Timeouts:
        `step_seconds` of a reset or step, `wait_seconds` of waiting for a free session. `lease_seconds`: lifetime of a
        lease. A server whose sessions differ from `spec` is refused. `owner` is shown on
        the server's status page. Raises ConfigError for an invalid address.
        """
        if isinstance(addresses, str):
            fixed = parse_server_addresses(addresses)
            self._addresses: AddressProvider = lambda: fixed
        else:
            self._addresses = addresses
        self._token = token if token is not None else os.environ.get(protocol.TOKEN_VARIABLE)
        self._operation_seconds, self._wait_seconds = step_seconds + NETWORK_MARGIN_SECONDS, wait_seconds
        self._request = protocol.LeaseRequest(lease_seconds, owner)
        self._spec = spec
        self._free: dict[str, int] = {}  # sessions of checked servers, by their latest answer
        self._away_until: dict[str, float] = {}  # monotonic time by address
        self._released = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> BrowserClient:
        network.use_own_threads()
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=60,
            ssl=client_context(os.environ.get(protocol.CA_VARIABLE, ""), protocol.CA_VARIABLE),
        )  # fmt: skip
        # Servers set no cookies, and the proxies of the environment are for the web.
        self._http = aiohttp.ClientSession(
            connector=connector, headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            cookie_jar=aiohttp.DummyCookieJar(), trust_env=False,
        )  # fmt: skip
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self._background:  # pending releases: each has its own timeout
            await asyncio.gather(*self._background, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
            self._http = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """Lease a session for one episode. Raises BrowserError if none becomes free in time, ConfigError."""
        session = RemoteSession(self, *await self.acquire_lease(), self._operation_seconds)
        try:
            yield session
        finally:
            await asyncio.shield(self._start(session.close()))

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until a server answers. Raises ServerUnreachable after `seconds`; ConfigError: wrong token or spec."""
        deadline, attempt = time.monotonic() + seconds, 0
        while True:
            answers = await asyncio.gather(*map(self._check, self._addresses()), return_exceptions=True)
            problems = [each for each in answers if isinstance(each, BaseException)]
            for problem in problems:
                if not isinstance(problem, BrowserError):
                    raise problem
            if len(problems) < len(answers):
                return
            if time.monotonic() + (delay := _backoff(attempt)) > deadline:
                reason = problems[-1] if problems else "no server has started"
                raise ServerUnreachable(f"no browser server within {seconds:.0f} s: {reason}")
            await asyncio.sleep(delay)
            attempt += 1

    async def server_state(self, address: str) -> protocol.ServerState:
        """The state of a browser server. Raises BrowserError, ConfigError."""
        return _parse(protocol.ServerState, await self.request("GET", address, "/state"), address)

    async def acquire_lease(self) -> tuple[protocol.Lease, str]:
        """A lease and the address of its server; waits for a free session. Raises BrowserBusy, ConfigError."""
        deadline, attempt = time.monotonic() + self._wait_seconds, 0
        while True:
            try:
                return await self._request_lease_anywhere()
            except BrowserBusy:
                delay = _backoff(attempt)
                if time.monotonic() + delay > deadline:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._released.wait()
            attempt += 1

    async def release_lease(self, lease: protocol.Lease, address: str) -> None:
        """End a lease, unless it has ended already."""
        try:
            await self.request("DELETE", address, _path(lease))
            self._free[address] = self._free.get(address, 0) + 1
        except (ConfigError, ValueError, BrowserError) as error:
            log.debug("lease not released: %s", error)
        finally:
            self._released.set()  # wakes the callers that wait for a free session
            self._released.clear()

    async def request(
        self, method: str, address: str, path: str, body: bytes | None = None, *,
        seconds: float = 0.0, accept: str = "application/json",
    ) -> bytes:  # fmt: skip
        """The response of a server to one request, at most `seconds` (0: REQUEST_TIMEOUT_SECONDS) later.

        Raises ServerUnreachable, LeaseLost, BrowserBusy, BrowserTimeout and other BrowserErrors; ScriptedPolicyError;
        ConfigError for a refused token; ValueError for another request that is refused.
        """
        assert self._http is not None, "BrowserClient is a context manager: async with BrowserClient(...) as browsers"
        headers = {"Accept": accept, **({} if body is None else {"Content-Type": "application/json"})}
        seconds = seconds or REQUEST_TIMEOUT_SECONDS
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
        path = f"{protocol.API_PREFIX}{path}"
        try:
            async with self._http.request(
                method, address + path, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as reply:
                content = await reply.read()
        except aiohttp.ConnectionTimeoutError as error:
            self._leave_out(address)
            raise ServerUnreachable(f"no connection to {address} within {CONNECT_TIMEOUT_SECONDS:.0f} s") from error
        except TimeoutError as error:
            raise BrowserTimeout(f"{address} did not answer {method} {path} within {seconds:.0f} s") from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{address!r} is not the address of a browser server") from error
        except (aiohttp.ClientError, OSError) as error:
            self._leave_out(address)
            raise ServerUnreachable(f"{address} cannot be reached: {first_line(error)}") from error
        if reply.status >= 300:
            raise _failure(address, path, reply.status, content)
        return content

    def _leave_out(self, address: str) -> None:
        """Request no lease of a server for a while; it is checked again then."""
        self._away_until[address] = time.monotonic() + AWAY_SECONDS
        self._free.pop(address, None)

    async def _request_lease_anywhere(self) -> tuple[protocol.Lease, str]:
        """Try all servers that are not away once. Raises BrowserBusy if none has a free session."""
        addresses, problem = self._sorted_addresses(), "no server has started"
        for address in addresses:
            if address in self._free:
                self._free[address] -= 1  # until the answer, lest simultaneous callers choose the same server
            request = self._start(self._request_lease(address))
            try:
                return await asyncio.shield(request), address
            except asyncio.CancelledError:
                request.add_done_callback(partial(self._release_unused, address))
                raise
            except BrowserBusy as busy:
                self._free[address] = 0
                problem = str(busy)
            except BrowserError as error:
                self._leave_out(address)
                problem = str(error)
        servers = ", ".join(addresses) or "servers to start"
        raise BrowserBusy(f"no browser within {self._wait_seconds:.0f} s; waited for {servers}; last: {problem}")

    def _sorted_addresses(self) -> list[str]:
        """The addresses to ask for a lease: most free sessions first, ties at random; all if all are away."""
        addresses, now = list(self._addresses()), time.monotonic()
        present = [address for address in addresses if self._away_until.get(address, 0.0) <= now]
        unknown = float("inf")  # its answer says how many it has
        return sorted(present or addresses, key=lambda address: (-self._free.get(address, unknown), random.random()))

    async def _request_lease(self, address: str) -> protocol.Lease:
        await self._check(address)
        body = await self.request("POST", address, "/leases", protocol.dump(self._request))
        lease = _parse(protocol.Lease, body, address)
        self._free[address] = lease.free
        return lease

    async def _check(self, address: str) -> None:
        """Check a server and its spec once, and again after it was unreachable. Raises BrowserError, ConfigError."""
        if address in self._free:
            return
        state = await self.server_state(address)
        if self._spec is not None and (differences := state.spec.differences(self._spec)):
            raise ConfigError(
                f"browser server {address} has {differences}; start it with the settings of the run, or give the run "
                "its"
            )
        self._free.setdefault(address, state.free)

    def _release_unused(self, address: str, request: asyncio.Task[protocol.Lease]) -> None:
        """Release the lease of a request whose caller was cancelled."""
        if not request.cancelled() and request.exception() is None and self._http is not None:
            self._start(self.release_lease(request.result(), address))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class RemoteSession:
    """Life cycle: reset -> step, step, ...; `BrowserClient.session` leases and releases it. Every operation ends
    within its timeout or raises a BrowserError, after which only a reset is possible.
    """

    def __init__(self, browsers: BrowserClient, lease: protocol.Lease, address: str, seconds: float) -> None:
        """`address` of the server that granted the lease; `seconds`: timeout of an operation."""
        self.task: Task | None = None
        self._browsers, self._seconds = browsers, seconds
        self._hold(lease, address)

    async def reset(self, task: Task | protocol.ResetRequest) -> Observation:
        """Open the task's page; the observation has an instruction. A dead server is replaced, once. After a
        ResetRequest, `task` is the one that the server made. Raises BrowserError, and ValueError for an unknown task.
        """
        if isinstance(task, Task):
            self.task, request = task, protocol.ResetRequest(task=task)
        else:
            request = task
        body = protocol.dump(request)
        try:
            observation = await self._observation("reset", body)
        except (ServerUnreachable, LeaseLost) as error:
            log.warning("%s; restarting the episode on another lease", error)
            self._renewing.cancel()
            self._hold(*await self._browsers.acquire_lease())
            observation = await self._observation("reset", body)
        if request.task is None:
            self.task = (await self.lease_state()).task
        return observation

    async def step(self, action: Action) -> Observation:
        """Execute an action and wait until the page is idle. Observation.error says what the page did not allow. Raises
        BrowserError, and ValueError for an action that lacks a required field or comes before the reset.
        """
        return await self._observation("step", protocol.dump(action))

    async def demonstration(self, premature_submit: bool = False) -> Action:
        """The next action of the task's scripted policy, or with `premature_submit` of one that submits too early.
        Raises ScriptedPolicyError, also if the task has no scripted policy, and BrowserError.
        """
        body = await self._call("GET", f"/demonstration?premature_submit={str(premature_submit).lower()}")
        return _parse(Action, body, self.address)

    async def lease_state(self) -> protocol.LeaseState:
        """The state of the lease on its server. Raises BrowserError."""
        return _parse(protocol.LeaseState, await self._call("GET", ""), self.address)

    async def spec(self) -> protocol.SessionSpec:
        """The session spec of the lease's server. Raises BrowserError."""
        return (await self._browsers.server_state(self.address)).spec

    async def close(self) -> None:
        """Release the lease. Called by `BrowserClient.session`."""
        self._renewing.cancel()
        await self._browsers.release_lease(self.lease, self.address)

    def _hold(self, lease: protocol.Lease, address: str) -> None:
        self.lease, self.address = lease, address
        self._last_contact = time.monotonic()  # sending time of the latest answered request
        self._renewing = asyncio.get_running_loop().create_task(self._keep_lease())

    async def _observation(self, operation: str, body: bytes) -> Observation:
        try:
            return protocol.decode_observation(
                await self._call("POST", f"/{operation}", body, accept=protocol.OBSERVATION_MEDIA_TYPE)
            )
        except protocol.ProtocolError as error:
            raise BrowserError(f"{self.address} sent an invalid observation: {error}") from error

    async def _call(self, method: str, path: str, body: bytes | None = None, **options: Any) -> bytes:
        sent, options = time.monotonic(), {"seconds": self._seconds} | options
        response = await self._browsers.request(method, self.address, _path(self.lease) + path, body, **options)
        self._last_contact = sent
        return response

    async def _keep_lease(self) -> None:
        """Renew the lease whenever a third of its lifetime has passed without a request, until it is lost."""
        third, attempt = self.lease.seconds / 3, 0
        while True:
            await asyncio.sleep(_backoff(attempt - 1) if attempt else self._last_contact + third - time.monotonic())
            if time.monotonic() < self._last_contact + third:
                continue  # an operation has been answered in the meantime
            try:
                await self._call("POST", "/renew", seconds=min(third, REQUEST_TIMEOUT_SECONDS))
                attempt = 0
            except (ConfigError, ValueError, BrowserError) as error:
                attempt += 1
                log.info("cannot renew the lease of %s: %s", self.task and self.task.id, error)
                late = time.monotonic() > self._last_contact + self.lease.seconds
                if late or not isinstance(error, BrowserError) or isinstance(error, LeaseLost):
                    return  # the next operation raises it again


def _failure(server: str, path: str, status: int, content: bytes) -> Exception:
    """The exception for a response with an error status."""
    try:
        error = protocol.load(protocol.ErrorResponse, content)
    except protocol.ProtocolError:
        error = protocol.ErrorResponse(content[:200].decode("utf-8", "replace").partition("\n")[0])
    text = f"{server} answered {status}: {error.error}"
    if status == 401:
        return ConfigError(f"{server} refuses the token; set {protocol.TOKEN_VARIABLE} to that of the server")
    if status == 403:
        return ConfigError(text)
    if status in (404, 409) and "/demonstration" in path:
        return ScriptedPolicyError(error.error)
    if status in (404, protocol.STATUS_LEASE_EXPIRED):
        return LeaseLost(text)
    if status == protocol.STATUS_BUSY:
        return BrowserBusy(text)
    if status == protocol.STATUS_BROWSER_FAILED:  # as on the server; an unknown outcome is kept
        outcome = error.outcome or BrowserError.outcome
        failure = _BY_OUTCOME.get(outcome, BrowserError)(error.error)
        failure.outcome = outcome
        return failure
    return ValueError(text) if status < 500 else BrowserError(text)


def _parse(kind: type[T], body: bytes, sender: str) -> T:
    """Parse the body of a response from `sender`. Raises BrowserError."""
    try:
        return protocol.load(kind, body)
    except protocol.ProtocolError as error:
        raise BrowserError(f"{sender} sent an invalid response: {error}") from error


def _path(lease: protocol.Lease) -> str:
    return f"/leases/{quote(lease.id, safe='')}"


def _backoff(attempt: int) -> float:
    """Seconds before the next attempt: doubles up to the maximum; the random half spreads clients over time."""
    half = min(INITIAL_BACKOFF_SECONDS * 2.0 ** min(attempt, 10), MAX_BACKOFF_SECONDS) / 2
    return half + random.uniform(0.0, half)
