"""The browsers of one machine, used by lease."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server.lease_session import LeaseSession, NoEpisode
from megatron_webrl.browser.server.leases import (
    DEFAULT_LEASE_SECONDS,
    MAX_LEASE_SECONDS,
    ActiveLease,
    Leases,
    NoCapacity,
)
from megatron_webrl.browser.server.metrics import ServerMetrics
from megatron_webrl.browser.server.protocol import (
    InvalidRequest,
    Lease,
    LeaseRequest,
    LeaseState,
    ResetRequest,
    ServerState,
    SessionSpec,
    validate_action,
)
from megatron_webrl.browser.server.request_validation import TaskCatalog
from megatron_webrl.config.schema import Config
from megatron_webrl.types import Action, Observation

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25
HEALTH_CHECK_SECONDS = 5.0
MAX_OWNER_CHARS = 200
T = TypeVar("T")
WaitForDisconnect = Callable[[], Awaitable[object]]  # returns when the client of a request has disconnected


class OperationConflict(Exception):
    """Another operation of the lease is running, or this one was cancelled; the message is one sentence."""


class NoScriptedPolicy(Exception):
    """The environment has no scripted policy; the message is one sentence."""


class BrowserServer:
    """Leases and sessions, in one event loop. `async with` ends every episode; the caller closes pool and catalog."""

    def __init__(
        self, config: Config, catalog: TaskCatalog, pool: BrowserPool, sessions: int, url: str,
        lease_seconds: float = DEFAULT_LEASE_SECONDS, max_lease_seconds: float = MAX_LEASE_SECONDS,
    ) -> None:  # fmt: skip
        """`pool` runs up to `sessions` episodes of the catalog's sites; clients reach the server at `url`."""
        self.url, self.instance_id = url, secrets.token_hex(4)
        self.catalog, self.pool = catalog, pool
        self.metrics = ServerMetrics()
        self.capacity_freed = asyncio.Event()  # set when a full server has a free session again
        self.leases: Leases[LeaseSession] = Leases(
            sessions, self.instance_id, default_seconds=lease_seconds, max_seconds=max_lease_seconds
        )
        self._step_seconds = config.rollout.operation_timeout_seconds
        self._spec = SessionSpec.from_config(config.browser)
        self._running: dict[str, asyncio.Task[Any]] = {}  # operations by lease
        self._sweeper: asyncio.Task[None] | None = None
        self.metrics.register_gauges(sessions, lambda: len(self.leases.active()), pool)

    async def __aenter__(self) -> BrowserServer:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(self._end_lease(lease, "the server has shut down") for lease in self.leases.active()))

    # Leases

    def create_lease(self, request: LeaseRequest) -> Lease:
        """Grant a lease. Raises NoCapacity, InvalidRequest."""
        if len(request.owner) > MAX_OWNER_CHARS or not request.owner.isprintable():
            raise InvalidRequest(f"owner: not a line of at most {MAX_OWNER_CHARS} characters")
        try:
            lease = self.leases.grant(request.seconds, request.owner, LeaseSession(self.pool, self._step_seconds))
        except NoCapacity:
            self.metrics.refused_leases.inc()
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        self.metrics.granted_leases.inc()
        return self._response(lease)

    def renew_lease(self, lease_id: str) -> Lease:
        """Restart the lease's lifetime. Raises LeaseExpired."""
        lease = self.leases.find(lease_id)
        self.leases.renew(lease)
        return self._response(lease)

    async def release_lease(self, lease_id: str) -> None:
        """End the lease and cancel its running operation. Raises LeaseExpired."""
        await self._end_lease(self.leases.find(lease_id), "the lease has been released")

    def lease_state(self, lease_id: str) -> LeaseState:
        """The state of a lease. Raises LeaseExpired."""
        return self.describe_lease(self.leases.find(lease_id))

    def describe_lease(self, lease: ActiveLease[LeaseSession]) -> LeaseState:
        """The state of a lease."""
        session, observation = lease.resource, lease.resource.observation
        return LeaseState(
            state=session.state, seconds_left=round(self.leases.seconds_left(lease), 3), owner=lease.owner,
            task=session.task, url=observation.url if observation else None,
            title=observation.title if observation else None, steps=session.steps, outcome=session.outcome,
            refused_requests=session.refused_requests,
        )  # fmt: skip

    def state(self) -> ServerState:
        """The state of the server."""
        return ServerState(
            url=self.url, instance_id=self.instance_id, sessions=self.leases.capacity, free=self.leases.free,
            spec=self._spec,
            leases=tuple(lease.id for lease in self.leases.active()), sources=self.catalog.environments,
        )  # fmt: skip

    # Episodes

    async def reset(self, lease_id: str, request: ResetRequest, disconnected: WaitForDisconnect) -> Observation:
        """Begin an episode. Raises BrowserError, LeaseExpired, OperationConflict, InvalidRequest."""
        lease = self.leases.find(lease_id)
        task = self.catalog.resolve_task(request)
        observation = await self._timed("reset", lease, lambda session: session.reset(task), disconnected)
        self.metrics.episodes.labels(task.source).inc()
        return observation

    async def step(self, lease_id: str, action: Action, disconnected: WaitForDisconnect) -> Observation:
        """Execute an action. Raises BrowserError, LeaseExpired, NoEpisode, OperationConflict, InvalidRequest."""
        lease = self.leases.find(lease_id)
        validate_action(action)
        try:
            observation = await self._timed("step", lease, lambda session: session.step(action), disconnected)
        except ValueError as error:  # the action lacks a required field
            raise InvalidRequest(f"{action.kind}: {error}") from error
        self.metrics.steps.inc()
        return observation

    async def demonstration(self, lease_id: str, premature_submit: bool, disconnected: WaitForDisconnect) -> Action:
        """The next action of the task's scripted policy. Raises BrowserError, LeaseExpired, NoEpisode,
        OperationConflict, ScriptedPolicyError, NoScriptedPolicy.
        """
        lease = self.leases.find(lease_id)
        task = lease.resource.task
        if task is None:
            raise NoEpisode("there is no episode; reset begins one")
        site = self.catalog.sites[task.source]
        try:
            return await self._operate(
                lease, lambda session: session.demonstration(site, premature_submit), disconnected
            )
        except KeyError:
            raise NoScriptedPolicy(f"{task.source} has no scripted policy for {task.environment}") from None

    async def health_problem(self) -> str | None:
        """Why the server cannot work; None if it can."""
        try:
            await self.pool.check_health(HEALTH_CHECK_SECONDS)
        except BrowserError as error:
            return str(error)
        return None

    def latest_observation(self, lease_id: str) -> Observation:
        """The latest observation of a lease's episode. Raises LeaseExpired, NoEpisode."""
        lease = self.leases.find(lease_id)
        self.leases.renew(lease)
        if lease.resource.observation is None:
            raise NoEpisode("there is no screenshot yet; reset begins an episode")
        return lease.resource.observation

    async def _timed(
        self,
        name: str,
        lease: ActiveLease[LeaseSession],
        work: Callable[[LeaseSession], Coroutine[Any, Any, T]],
        disconnected: WaitForDisconnect,
    ) -> T:
        started = time.monotonic()
        try:
            result = await self._operate(lease, work, disconnected)
        except BrowserError as error:
            self.metrics.errors.labels(error.outcome).inc()
            log.warning("%s of %s failed, %s: %s", name, lease.owner or "a lease", error.outcome, error)
            raise
        self.metrics.operation_seconds.labels(name).observe(time.monotonic() - started)
        return result

    async def _operate(
        self,
        lease: ActiveLease[LeaseSession],
        work: Callable[[LeaseSession], Coroutine[Any, Any, T]],
        disconnected: WaitForDisconnect,
    ) -> T:
        """Run one operation of a lease; cancel it if the client disconnects or the lease is released. The lease's
        lifetime restarts when it begins and when it ends, but not when its client has disconnected.
        """
        if lease.busy:
            raise OperationConflict("another operation of this lease is running; wait for its response")
        lease.busy = True
        self.leases.renew(lease)
        running = self._running[lease.id] = asyncio.ensure_future(work(lease.resource))
        leaving = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                await asyncio.wait({running})  # a session ends at once
            else:
                self.leases.renew(lease)
            if running.cancelled():
                self.leases.find(lease.id)  # raises if the lease has ended
                raise OperationConflict("the operation was cancelled")
            return running.result()
        finally:
            leaving.cancel()
            running.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
            del self._running[lease.id]
            lease.busy = False

    # End of leases

    async def _end_lease(self, lease: ActiveLease[LeaseSession], reason: str) -> None:
        was_full = not self.leases.free
        if not self.leases.release(lease, reason):
            return
        running = self._running.get(lease.id)
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await lease.resource.end_episode()
        if was_full:
            self.capacity_freed.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            was_full = not self.leases.free
            for lease in self.leases.release_expired():
                self.metrics.expired_leases.inc()
                log.info("a lease of %s has expired", lease.owner or "an unnamed owner")
                await lease.resource.end_episode()
            if was_full and self.leases.free:
                self.capacity_freed.set()

    def _response(self, lease: ActiveLease[LeaseSession]) -> Lease:
        return Lease(lease.id, lease.seconds, self.url)
