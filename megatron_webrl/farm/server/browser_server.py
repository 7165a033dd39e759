"""One machine's browsers, for those who hold a lease."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config.schema import Config
from megatron_webrl.farm.leases import DEFAULT_LEASE_SECONDS, MAX_LEASE_SECONDS, ActiveLease, Leases, NoCapacity
from megatron_webrl.farm.metrics import ServerMetrics
from megatron_webrl.farm.protocol import Lease, LeaseRequest, LeaseState, ResetRequest, ServerState, SessionSpec
from megatron_webrl.farm.request_validation import InvalidRequest, TaskCatalog, validate_action
from megatron_webrl.farm.server.lease_session import LeaseSession, NoEpisode
from megatron_webrl.types import Action, Observation

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25
HEALTH_CHECK_SECONDS = 5.0
MAX_OWNER_CHARS = 200  # characters
T = TypeVar("T")
WaitForDisconnect = Callable[[], Awaitable[object]]
"""Returns once nobody waits for the answer any more."""


class OperationConflict(Exception):
    """An operation that cannot be done at this time; the message is one sentence."""


class NoScriptedPolicy(Exception):
    """There is no script for an environment; the message is one sentence."""


class BrowserServer:
    """Leases, and the room that each of them has in the fleet. All in one event loop.

    Life: `async with Node(...)`, which ends every episode; the fleet and the catalogue are whose they were.
    """

    def __init__(
        self, config: Config, catalog: TaskCatalog, pool: BrowserPool, sessions: int, url: str,
        lease_seconds: float = DEFAULT_LEASE_SECONDS, max_lease_seconds: float = MAX_LEASE_SECONDS,
    ) -> None:  # fmt: skip
        """`fleet` runs `sessions` episodes of the catalogue's sites at a time; clients reach the node at `url`."""
        self.url, self.instance_id = url, secrets.token_hex(4)
        self.catalog, self.pool = catalog, pool
        self.metrics = ServerMetrics()
        self.capacity_freed = asyncio.Event()  # a place, where there was none; for whoever announces it
        self.leases: Leases[LeaseSession] = Leases(
            sessions, self.instance_id, default_seconds=lease_seconds, max_seconds=max_lease_seconds
        )
        self._step_seconds = config.rollout.operation_timeout_seconds
        self._view = SessionSpec.from_config(config.browser)
        self._running: dict[str, asyncio.Task[Any]] = {}  # operations by lease
        self._sweeping: asyncio.Task[None] | None = None
        self.metrics.register_gauges(sessions, lambda: len(self.leases.active()), pool)

    async def __aenter__(self) -> BrowserServer:
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await asyncio.gather(*(self._let_go(lease, "the node has ended") for lease in self.leases.active()))

    # Leases

    def create_lease(self, request: LeaseRequest) -> Lease:
        """Give a place. Raises NoPlace, BadInput."""
        if len(request.owner) > MAX_OWNER_CHARS or not request.owner.isprintable():
            raise InvalidRequest(f"owner: not a line of at most {MAX_OWNER_CHARS} characters")
        try:
            held = self.leases.grant(request.seconds, request.owner, LeaseSession(self.pool, self._step_seconds))
        except NoCapacity:
            self.metrics.refused_leases.inc()
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        self.metrics.granted_leases.inc()
        return self._lease(held)

    def renew_lease(self, lease_id: str) -> Lease:
        """Begin the lease's life anew. Raises NotHeld."""
        held = self.leases.find(lease_id)
        self.leases.renew(held)
        return self._lease(held)

    async def release_lease(self, lease_id: str) -> None:
        """End the lease; an operation under way is broken off. Raises NotHeld."""
        await self._let_go(self.leases.find(lease_id), "the lease has been released")

    def lease_state(self, lease_id: str) -> LeaseState:
        """What is known of a lease. Raises NotHeld."""
        return self.describe_lease(self.leases.find(lease_id))

    def describe_lease(self, lease: ActiveLease[LeaseSession]) -> LeaseState:
        """What is known of a lease."""
        room, seen = lease.resource, lease.resource.observation
        return LeaseState(
            state=room.state, seconds_left=round(self.leases.seconds_left(lease), 3), owner=lease.owner, task=room.task,
            url=seen.url if seen else None, title=seen.title if seen else None, steps=room.steps,
            outcome=room.outcome, refused_requests=room.refused_requests,
        )  # fmt: skip

    def state(self) -> ServerState:
        """What the node says of itself."""
        held = self.leases.active()
        return ServerState(
            url=self.url, instance_id=self.instance_id, sessions=self.leases.capacity, free=self.leases.free, spec=self._view,
            leases=tuple(lease.id for lease in held), sources=self.catalog.environments,
        )  # fmt: skip

    # Episodes

    async def reset(self, lease_id: str, request: ResetRequest, disconnected: WaitForDisconnect) -> Observation:
        """Begin an episode. Raises BrowserError, NotHeld, Conflict, BadInput."""
        held = self.leases.find(lease_id)
        task = self.catalog.resolve_task(request)
        seen = await self._timed("reset", held, lambda room: room.reset(task), disconnected)
        self.metrics.episodes.labels(task.source).inc()
        return seen

    async def step(self, lease_id: str, action: Action, disconnected: WaitForDisconnect) -> Observation:
        """Act. Raises BrowserError, NotHeld, NoEpisode, Conflict, BadInput."""
        held = self.leases.find(lease_id)
        validate_action(action)
        try:
            seen = await self._timed("step", held, lambda room: room.step(action), disconnected)
        except ValueError as error:  # the action lacks what its kind needs
            raise InvalidRequest(f"{action.kind}: {error}") from error
        self.metrics.steps.inc()
        return seen

    async def demonstration(self, lease_id: str, premature_submit: bool, disconnected: WaitForDisconnect) -> Action:
        """What a script would do next. Raises BrowserError, NotHeld, NoEpisode, Conflict, OracleError, NoScript."""
        held = self.leases.find(lease_id)
        task = held.resource.task
        if task is None:
            raise NoEpisode("there is no episode; reset begins one")
        site = self.catalog.sites[task.source]
        try:
            return await self._operate(held, lambda room: room.demonstration(site, premature_submit), disconnected)
        except KeyError:
            raise NoScriptedPolicy(f"there is no script for {task.environment} of {task.source}") from None

    async def health_problem(self) -> str | None:
        """Why the node cannot work, if it cannot."""
        try:
            await self.pool.check_health(HEALTH_CHECK_SECONDS)
        except BrowserError as error:
            return str(error)
        return None

    def latest_observation(self, lease_id: str) -> Observation:
        """The latest observation of a lease's episode. Raises NotHeld, NoEpisode."""
        held = self.leases.find(lease_id)
        self.leases.renew(held)
        if held.resource.observation is None:
            raise NoEpisode("there is no screenshot yet; reset begins an episode")
        return held.resource.observation

    async def _timed(
        self,
        name: str,
        held: ActiveLease[LeaseSession],
        work: Callable[[LeaseSession], Coroutine[Any, Any, T]],
        gone: WaitForDisconnect,
    ) -> T:
        started = time.monotonic()
        try:
            result = await self._operate(held, work, gone)
        except BrowserError as error:
            self.metrics.errors.labels(error.outcome).inc()
            log.warning("%s of %s failed, %s: %s", name, held.owner or "a lease", error.outcome, error)
            raise
        self.metrics.operation_seconds.labels(name).observe(time.monotonic() - started)
        return result

    async def _operate(
        self,
        held: ActiveLease[LeaseSession],
        work: Callable[[LeaseSession], Coroutine[Any, Any, T]],
        gone: WaitForDisconnect,
    ) -> T:
        """The only operation of a lease at a time. It is broken off when the client goes away or the lease is released.

        A client that has gone away does not prolong its lease by what it had begun.
        """
        if held.busy:
            raise OperationConflict("another operation of this lease is under way; wait for its answer")
        held.busy = True
        self.leases.renew(held)
        running = self._running[held.id] = asyncio.ensure_future(work(held.resource))
        leaving = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                await asyncio.wait({running})  # which a session does at once
            else:
                self.leases.renew(held)
            if running.cancelled():
                self.leases.find(held.id)  # says so if the lease has ended meanwhile
                raise OperationConflict("the operation was broken off")
            return running.result()
        finally:
            leaving.cancel()
            running.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
            del self._running[held.id]
            held.busy = False

    # Ends

    async def _let_go(self, held: ActiveLease[LeaseSession], reason: str) -> None:
        was_full = not self.leases.free
        if not self.leases.release(held, reason):
            return
        running = self._running.get(held.id)
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await held.resource.end_episode()
        if was_full:
            self.capacity_freed.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            was_full = not self.leases.free
            for held in self.leases.release_expired():
                self.metrics.expired_leases.inc()
                log.info("a lease of %s has expired", held.owner or "someone")
                await held.resource.end_episode()
            if was_full and self.leases.free:
                self.capacity_freed.set()

    def _lease(self, held: ActiveLease[LeaseSession]) -> Lease:
        return Lease(held.id, held.seconds, self.url)
