"""The browsers of one machine, used by lease: a limited number of leases, each with a lifetime and one episode."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError, BrowserTimeout
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.metrics import ServerMetrics
from megatron_webrl.browser.server.protocol import InvalidRequest
from megatron_webrl.browser.server.task_catalog import TaskCatalog
from megatron_webrl.browser.session import Session
from megatron_webrl.config.schema import Config
from megatron_webrl.types import Action, Observation, Task
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

SECRET_BYTES = 18  # of a lease id, so that nobody can guess it
MAX_ENDED_LEASES = 4096  # ended leases whose reason is remembered
SWEEP_SECONDS = 0.25
T = TypeVar("T")
WaitForDisconnect = Callable[[], Awaitable[object]]  # returns when the client of a request has disconnected


class RequestRefused(Exception):
    """A request that the state of the server does not permit; the message is one sentence for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def no_episode(reason: str = "there is no episode") -> RequestRefused:
    return RequestRefused(protocol.STATUS_CONFLICT, f"{reason}; reset begins one")


class LeaseSession:
    """One lease. Life cycle: reset -> step, step, ... -> reset -> ... -> end_episode, one operation at a time."""

    def __init__(self, pool: BrowserPool, step_seconds: float, seconds: float, owner: str) -> None:
        """`seconds`: lifetime from the last use."""
        self.id = secrets.token_urlsafe(SECRET_BYTES)
        self.seconds, self.owner = seconds, owner
        self.running: asyncio.Future[Any] | None = None  # operation; the lease does not expire during it
        self.state: protocol.SessionState = "idle"
        self.task: Task | None = None
        self.observation: Observation | None = None
        self.steps = 0
        self.outcome: str | None = None  # name of the browser failure
        self._pool, self._step_seconds = pool, step_seconds
        self._session: Session | None = None
        self._open = AsyncExitStack()
        self.renew()

    def renew(self) -> None:
        """Restart the lifetime."""
        self._deadline = time.monotonic() + self.seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the lease expires if unused; the full lifetime during an operation."""
        return self.seconds if self.running else max(0.0, self._deadline - time.monotonic())

    @property
    def expiry_message(self) -> str:
        return f"the lease has expired: neither used nor renewed for {self.seconds:g} s"

    def describe(self) -> protocol.LeaseState:
        seen = self.observation
        return protocol.LeaseState(
            state=self.state, seconds_left=round(self.seconds_left, 3), owner=self.owner, task=self.task,
            url=seen.url if seen else None, title=seen.title if seen else None, steps=self.steps, outcome=self.outcome,
            refused_requests={} if self._session is None else dict(self._session.network.refused),
            cdp_address=None if self._session is None else self._session.cdp_address,
        )  # fmt: skip

    async def reset(self, task: Task) -> Observation:
        """End the previous episode and begin one in a fresh browser context. Raises BrowserError."""
        await self.end_episode()
        self.task, self.state = task, "resetting"
        try:
            self._session, observation = await self._open.enter_async_context(self._pool.episode(task))
        except BaseException as error:
            await self._fail(error)
            raise
        self.state, self.observation = "waiting", observation
        return observation

    async def step(self, action: Action) -> Observation:
        """Execute an action. Raises BrowserError, which ends the episode; InvalidRequest, RequestRefused."""
        session, self.state = self._running_session(), "acting"
        try:
            self.observation = await session.step(action)
        except ValueError as error:  # the action lacks a required field
            self.state = "waiting"
            raise InvalidRequest(f"{action.kind}: {error}") from error
        except BaseException as error:
            await self._fail(error)
            raise
        self.state = "waiting"
        self.steps += 1
        return self.observation

    async def demonstration(self, catalog: TaskCatalog, premature_submit: bool) -> Action:
        """The scripted policy's next action. Raises BrowserError, RequestRefused, ScriptedPolicyError."""
        session, task = self._running_session(), self.task
        assert task is not None
        try:
            async with asyncio.timeout(self._step_seconds):
                return await catalog.sites[task.source].demonstrate(session.page, task, premature_submit)
        except KeyError:
            missing = f"{task.source} has no scripted policy for {task.environment}"
            raise RequestRefused(protocol.STATUS_NOT_FOUND, missing) from None
        except TimeoutError:
            limit = f"{self._step_seconds} s (rollout.operation_timeout_seconds)"
            raise BrowserTimeout(f"the scripted policy did not read the page within {limit}") from None
        except PlaywrightError as error:
            raise BrowserError(f"the scripted policy could not read the page: {first_line(error)}") from error

    async def end_episode(self) -> None:
        """Return the browser context to the pool and reset the state. A second call does nothing."""
        self._session, self.task, self.observation, self.outcome = None, None, None, None
        self.state, self.steps = "idle", 0
        await self._open.aclose()

    def _running_session(self) -> Session:
        if self._session is None:
            raise no_episode(f"the episode ended with {self.outcome}") if self.outcome else no_episode()
        return self._session

    async def _fail(self, error: BaseException) -> None:
        self._session, self.state = None, "crashed"
        self.outcome = error.outcome if isinstance(error, BrowserError) else "cancelled"
        await self._open.aclose()


class BrowserServer:
    """Leases and sessions, in one event loop. `async with` ends every episode; the caller closes pool and catalog."""

    def __init__(self, config: Config, catalog: TaskCatalog, pool: BrowserPool, sessions: int, url: str) -> None:
        """`sessions`: the most leases at a time, as many as `pool` runs episodes of the catalog's sites; clients reach
        the server at `url`.
        """
        self.url, self.catalog, self.pool, self.sessions = url, catalog, pool, sessions
        self.metrics = ServerMetrics(sessions, lambda: len(self._leases), pool)
        self._step_seconds = config.rollout.operation_timeout_seconds
        self._spec = protocol.SessionSpec.from_config(config.browser)
        self._leases: dict[str, LeaseSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # reason by id
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> BrowserServer:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(self._end_lease(lease, "the server has shut down") for lease in self.active_leases()))

    # Leases

    def active_leases(self) -> list[LeaseSession]:
        """All leases, oldest first, with those that have expired but are not released yet."""
        return list(self._leases.values())

    def create_lease(self, request: protocol.LeaseRequest) -> protocol.Lease:
        """Grant a lease. Raises RequestRefused."""
        if len(self._leases) >= self.sessions:
            self.metrics.refused_leases.inc()
            raise RequestRefused(protocol.STATUS_BUSY, f"all {self.sessions} sessions of this server are leased")
        self.metrics.granted_leases.inc()
        lease = LeaseSession(self.pool, self._step_seconds, request.seconds, request.owner)
        self._leases[lease.id] = lease
        return self._describe_grant(lease)

    def find_lease(self, lease_id: str) -> LeaseSession:
        """The lease, unless it has ended or expired. Raises RequestRefused."""
        lease = self._leases.get(lease_id)
        if lease is None or not lease.seconds_left:
            reason = lease.expiry_message if lease else self._ended.get(lease_id, "this server knows no such lease")
            raise RequestRefused(protocol.STATUS_LEASE_EXPIRED, reason)
        return lease

    def renew_lease(self, lease_id: str) -> protocol.Lease:
        """Restart the lease's lifetime. Raises RequestRefused."""
        lease = self.find_lease(lease_id)
        lease.renew()
        return self._describe_grant(lease)

    async def release_lease(self, lease_id: str) -> None:
        """End the lease and cancel its running operation. Raises RequestRefused."""
        await self._end_lease(self.find_lease(lease_id), "the lease has been released")

    def state(self) -> protocol.ServerState:
        return protocol.ServerState(self.sessions, self._free, self._spec, tuple(self._leases))

    # Episodes

    async def reset(
        self, lease_id: str, request: protocol.ResetRequest, disconnected: WaitForDisconnect
    ) -> Observation:
        """Begin an episode. Raises BrowserError, RequestRefused, InvalidRequest."""
        lease = self.find_lease(lease_id)
        task = self.catalog.resolve_task(request)
        observation = await self._operate("reset", lease, lease.reset(task), disconnected)
        self.metrics.episodes.labels(task.source).inc()
        return observation

    async def step(self, lease_id: str, action: Action, disconnected: WaitForDisconnect) -> Observation:
        """Execute an action. Raises BrowserError, RequestRefused, InvalidRequest."""
        lease = self.find_lease(lease_id)
        observation = await self._operate("step", lease, lease.step(action), disconnected)
        self.metrics.steps.inc()
        return observation

    async def demonstration(self, lease_id: str, premature_submit: bool, disconnected: WaitForDisconnect) -> Action:
        """The next action of the task's scripted policy. Raises BrowserError, RequestRefused, ScriptedPolicyError."""
        lease = self.find_lease(lease_id)
        work = lease.demonstration(self.catalog, premature_submit)
        return await self._operate("demonstration", lease, work, disconnected)

    def latest_observation(self, lease_id: str) -> Observation:
        """The latest observation of a lease's episode. Raises RequestRefused."""
        lease = self.find_lease(lease_id)
        lease.renew()
        if lease.observation is None:
            raise no_episode()
        return lease.observation

    async def _operate(
        self, name: str, lease: LeaseSession, work: Coroutine[Any, Any, T], disconnected: WaitForDisconnect
    ) -> T:
        """Run one operation of a lease; cancel it if the client disconnects or the lease is released. The lease's
        lifetime restarts when it begins and when it ends, but not when its client has disconnected.
        """
        if lease.running:
            work.close()
            message = "another operation of this lease is running; wait for its response"
            raise RequestRefused(protocol.STATUS_CONFLICT, message)
        lease.renew()
        started = time.monotonic()
        running = lease.running = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                await asyncio.wait({running})  # a session ends at once
            else:
                lease.renew()
            if running.cancelled():
                self.find_lease(lease.id)  # raises if the lease has ended
                raise RequestRefused(protocol.STATUS_CONFLICT, "the operation was cancelled")
            result = running.result()
        except BrowserError as error:
            self.metrics.errors.labels(error.outcome).inc()
            log.warning("%s of %s failed, %s: %s", name, lease.owner or "a lease", error.outcome, error)
            raise
        finally:
            leaving.cancel()
            running.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
            lease.running = None
        self.metrics.operation_seconds.labels(name).observe(time.monotonic() - started)
        return result

    # End of leases

    async def _end_lease(self, lease: LeaseSession, reason: str) -> None:
        if self._leases.pop(lease.id, None) is None:
            return
        self._ended[lease.id] = reason
        if len(self._ended) > MAX_ENDED_LEASES:
            self._ended.popitem(last=False)
        if (running := lease.running) is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await lease.end_episode()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for lease in self.active_leases():
                if not lease.seconds_left:
                    self.metrics.expired_leases.inc()
                    log.info("a lease of %s has expired", lease.owner or "an unnamed owner")
                    await self._end_lease(lease, lease.expiry_message)

    @property
    def _free(self) -> int:
        return self.sessions - len(self._leases)

    def _describe_grant(self, lease: LeaseSession) -> protocol.Lease:
        return protocol.Lease(lease.id, lease.seconds, self._free)
