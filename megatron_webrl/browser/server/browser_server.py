"""The browsers of one machine, used by lease: at most `capacity` leases, each with a lifetime and one episode."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError, BrowserTimeout
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.metrics import ServerMetrics
from megatron_webrl.browser.server.protocol import InvalidRequest
from megatron_webrl.browser.server.task_catalog import TaskCatalog
from megatron_webrl.browser.session import Session
from megatron_webrl.config.schema import Config
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Observation, Task
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

DEFAULT_LEASE_SECONDS, MAX_LEASE_SECONDS = 60.0, 3600.0
SECRET_BYTES = 18
MAX_ENDED_LEASES = 4096  # ended leases whose reason is remembered
SWEEP_SECONDS = 0.25
HEALTH_CHECK_SECONDS = 5.0
MAX_OWNER_CHARS = 200
T = TypeVar("T")
WaitForDisconnect = Callable[[], Awaitable[object]]  # returns when the client of a request has disconnected


class NoCapacity(Exception):
    """All sessions are leased."""


class LeaseExpired(Exception):
    """The lease is unknown or has ended; the message is one sentence."""


class NoEpisode(Exception):
    """There was no reset yet, or the browser has failed; the message is one sentence."""


class OperationConflict(Exception):
    """Another operation of the lease is running, or this one was cancelled; the message is one sentence."""


class NoScriptedPolicy(Exception):
    """The environment has no scripted policy; the message is one sentence."""


@dataclass
class ActiveLease(Generic[T]):
    """One lease and its resource."""

    id: str
    seconds: float  # lifetime from the last use
    owner: str
    resource: T
    deadline: float  # of the clock of Leases
    running: asyncio.Future[Any] | None = None  # operation; the lease does not expire during it


class Leases(Generic[T]):
    """At most `capacity` leases; one neither used nor renewed for its lifetime has expired, even before
    `release_expired`. An id is a secret, so that nobody can guess it.
    """

    def __init__(
        self, capacity: int, default_seconds: float = DEFAULT_LEASE_SECONDS, max_seconds: float = MAX_LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.capacity, self.default_seconds, self.max_seconds = capacity, default_seconds, max_seconds
        self._clock = clock
        self._active: dict[str, ActiveLease[T]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # reason by id

    @property
    def free(self) -> int:
        """Number of sessions without a lease."""
        return self.capacity - len(self._active)

    def active(self) -> list[ActiveLease[T]]:
        """All leases, oldest first, with those that have expired but are not released yet."""
        return list(self._active.values())

    def grant(self, seconds: float | None, owner: str, resource: T) -> ActiveLease[T]:
        """Grant a lease of `seconds`; None: the default lifetime. Raises InvalidRequest, NoCapacity."""
        lifetime = self.default_seconds if seconds is None else seconds
        if not 0 < lifetime <= self.max_seconds:
            raise InvalidRequest(
                f"seconds: {lifetime:g} is not between 0 and {self.max_seconds:g}, the maximum lifetime"
            )
        if not self.free:
            raise NoCapacity(f"all {self.capacity} sessions of this server are leased")
        id = secrets.token_urlsafe(SECRET_BYTES)
        lease = self._active[id] = ActiveLease(id, lifetime, owner, resource, self._clock() + lifetime)
        return lease

    def find(self, lease_id: str) -> ActiveLease[T]:
        """The lease, unless it has ended. Raises LeaseExpired."""
        lease = self._active.get(lease_id)
        if lease is None:
            raise LeaseExpired(self._ended.get(lease_id, "this server knows no such lease"))
        if self._is_expired(lease):
            raise LeaseExpired(_expiry_message(lease))
        return lease

    def renew(self, lease: ActiveLease[T]) -> None:
        """Restart the lease's lifetime."""
        lease.deadline = self._clock() + lease.seconds

    def seconds_left(self, lease: ActiveLease[T]) -> float:
        """Seconds until the lease expires if unused; the full lifetime during an operation."""
        return lease.seconds if lease.running else max(0.0, lease.deadline - self._clock())

    def release(self, lease: ActiveLease[T], reason: str) -> bool:
        """End the lease; False if it had ended before."""
        if self._active.pop(lease.id, None) is None:
            return False
        self._ended[lease.id] = reason
        if len(self._ended) > MAX_ENDED_LEASES:
            self._ended.popitem(last=False)
        return True

    def release_expired(self) -> list[ActiveLease[T]]:
        """End the expired leases and return them."""
        expired = [lease for lease in self._active.values() if self._is_expired(lease)]
        for lease in expired:
            self.release(lease, _expiry_message(lease))
        return expired

    def _is_expired(self, lease: ActiveLease[T]) -> bool:
        return lease.running is None and self._clock() >= lease.deadline


def _expiry_message(lease: ActiveLease[T]) -> str:
    return f"the lease has expired: neither used nor renewed for {lease.seconds:g} s"


class LeaseSession:
    """Life cycle: reset -> step, step, ... -> reset -> ... -> end_episode. The caller runs one operation at a time."""

    def __init__(self, pool: BrowserPool, step_seconds: float) -> None:
        self.state: protocol.SessionState = "idle"
        self.task: Task | None = None
        self.observation: Observation | None = None
        self.steps = 0
        self.outcome: str | None = None  # name of the browser failure
        self._pool, self._step_seconds = pool, step_seconds
        self._session: Session | None = None
        self._open = AsyncExitStack()

    @property
    def refused_requests(self) -> dict[str, int]:
        """Number of page requests of this episode that the egress policy refused, by reason."""
        return {} if self._session is None else dict(self._session.network.refused)

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
        """Execute an action. Raises BrowserError, which ends the episode; ValueError, NoEpisode."""
        session, self.state = self._running(), "acting"
        try:
            self.observation = await session.step(action)
        except ValueError:
            self.state = "waiting"
            raise
        except BaseException as error:
            await self._fail(error)
            raise
        self.state = "waiting"
        self.steps += 1
        return self.observation

    async def demonstration(self, site: TaskSource | OpenWeb, premature_submit: bool) -> Action:
        """The scripted policy's next action. Raises BrowserError, NoEpisode, ScriptedPolicyError; KeyError if none."""
        session, task = self._running(), self.task
        assert task is not None
        try:
            async with asyncio.timeout(self._step_seconds):
                return await site.demonstrate(session.page, task, premature_submit)
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

    def _running(self) -> Session:
        if self._session is None:
            ended = f"the episode ended with {self.outcome}" if self.outcome else "there is no episode"
            raise NoEpisode(f"{ended}; reset begins one")
        return self._session

    async def _fail(self, error: BaseException) -> None:
        """Return the browser context to the pool, but keep task and observation for state queries."""
        self._session, self.state = None, "crashed"
        self.outcome = error.outcome if isinstance(error, BrowserError) else "cancelled"
        await self._open.aclose()


class BrowserServer:
    """Leases and sessions, in one event loop. `async with` ends every episode; the caller closes pool and catalog."""

    def __init__(
        self, config: Config, catalog: TaskCatalog, pool: BrowserPool, sessions: int, url: str,
        lease_seconds: float = DEFAULT_LEASE_SECONDS, max_lease_seconds: float = MAX_LEASE_SECONDS,
    ) -> None:  # fmt: skip
        """`pool` runs up to `sessions` episodes of the catalog's sites; clients reach the server at `url`."""
        self.url, self.catalog, self.pool = url, catalog, pool
        self.leases: Leases[LeaseSession] = Leases(sessions, lease_seconds, max_lease_seconds)
        self.metrics = ServerMetrics(sessions, lambda: len(self.leases.active()), pool)
        self._step_seconds = config.rollout.operation_timeout_seconds
        self._spec = protocol.SessionSpec.from_config(config.browser)
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> BrowserServer:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(self._end_lease(lease, "the server has shut down") for lease in self.leases.active()))

    # Leases

    def create_lease(self, request: protocol.LeaseRequest) -> protocol.Lease:
        """Grant a lease. Raises NoCapacity, InvalidRequest."""
        if len(request.owner) > MAX_OWNER_CHARS or not request.owner.isprintable():
            raise InvalidRequest(f"owner: not a line of at most {MAX_OWNER_CHARS} characters")
        try:
            lease = self.leases.grant(request.seconds, request.owner, LeaseSession(self.pool, self._step_seconds))
        except NoCapacity:
            self.metrics.refused_leases.inc()
            raise
        self.metrics.granted_leases.inc()
        return self._describe_grant(lease)

    def renew_lease(self, lease_id: str) -> protocol.Lease:
        """Restart the lease's lifetime. Raises LeaseExpired."""
        lease = self.leases.find(lease_id)
        self.leases.renew(lease)
        return self._describe_grant(lease)

    async def release_lease(self, lease_id: str) -> None:
        """End the lease and cancel its running operation. Raises LeaseExpired."""
        await self._end_lease(self.leases.find(lease_id), "the lease has been released")

    def lease_state(self, lease_id: str) -> protocol.LeaseState:
        """The state of a lease. Raises LeaseExpired."""
        return self.describe_lease(self.leases.find(lease_id))

    def describe_lease(self, lease: ActiveLease[LeaseSession]) -> protocol.LeaseState:
        """The state of a lease."""
        session, observation = lease.resource, lease.resource.observation
        return protocol.LeaseState(
            state=session.state, seconds_left=round(self.leases.seconds_left(lease), 3), owner=lease.owner,
            task=session.task, url=observation.url if observation else None,
            title=observation.title if observation else None, steps=session.steps, outcome=session.outcome,
            refused_requests=session.refused_requests,
        )  # fmt: skip

    def state(self) -> protocol.ServerState:
        """The state of the server."""
        leases = tuple(lease.id for lease in self.leases.active())
        return protocol.ServerState(self.leases.capacity, self.leases.free, self._spec, leases)

    # Episodes

    async def reset(
        self, lease_id: str, request: protocol.ResetRequest, disconnected: WaitForDisconnect
    ) -> Observation:
        """Begin an episode. Raises BrowserError, LeaseExpired, OperationConflict, InvalidRequest."""
        lease = self.leases.find(lease_id)
        task = self.catalog.resolve_task(request)
        observation = await self._timed("reset", lease, lambda session: session.reset(task), disconnected)
        self.metrics.episodes.labels(task.source).inc()
        return observation

    async def step(self, lease_id: str, action: Action, disconnected: WaitForDisconnect) -> Observation:
        """Execute an action. Raises BrowserError, LeaseExpired, NoEpisode, OperationConflict, InvalidRequest."""
        lease = self.leases.find(lease_id)
        protocol.validate_action(action)
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
        self, name: str, lease: ActiveLease[LeaseSession], work: Callable[[LeaseSession], Coroutine[Any, Any, T]],
        disconnected: WaitForDisconnect,
    ) -> T:  # fmt: skip
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
        self, lease: ActiveLease[LeaseSession], work: Callable[[LeaseSession], Coroutine[Any, Any, T]],
        disconnected: WaitForDisconnect,
    ) -> T:  # fmt: skip
        """Run one operation of a lease; cancel it if the client disconnects or the lease is released. The lease's
        lifetime restarts when it begins and when it ends, but not when its client has disconnected.
        """
        if lease.running:
            raise OperationConflict("another operation of this lease is running; wait for its response")
        self.leases.renew(lease)
        running = lease.running = asyncio.ensure_future(work(lease.resource))
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
            lease.running = None

    # End of leases

    async def _end_lease(self, lease: ActiveLease[LeaseSession], reason: str) -> None:
        if not self.leases.release(lease, reason):
            return
        if (running := lease.running) is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await lease.resource.end_episode()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for lease in self.leases.release_expired():
                self.metrics.expired_leases.inc()
                log.info("a lease of %s has expired", lease.owner or "an unnamed owner")
                await lease.resource.end_episode()

    def _describe_grant(self, lease: ActiveLease[LeaseSession]) -> protocol.Lease:
        return protocol.Lease(lease.id, lease.seconds, self.leases.free)
