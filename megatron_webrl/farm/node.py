"""One machine's browsers, for those who hold a lease."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.fleet import Fleet
from megatron_webrl.config import Config
from megatron_webrl.farm.leases import DEFAULT_SECONDS, MAX_SECONDS, Held, Leases, NoPlace
from megatron_webrl.farm.measures import Measures
from megatron_webrl.farm.opening import BadInput, Catalogue, checked
from megatron_webrl.farm.room import NoEpisode, Room
from megatron_webrl.farm.wire import Lease, LeaseRequest, LeaseState, NodeState, Reset, View
from megatron_webrl.types import Action, Observation

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25
CHECK_SECONDS = 5.0
MAX_OWNER = 200  # characters
T = TypeVar("T")
Gone = Callable[[], Awaitable[object]]
"""Returns once nobody waits for the answer any more."""


class Conflict(Exception):
    """An operation that cannot be done at this time; the message is one sentence."""


class NoScript(Exception):
    """There is no script for an environment; the message is one sentence."""


class Node:
    """Leases, and the room that each of them has in the fleet. All in one event loop.

    Life: `async with Node(...)`, which ends every episode; the fleet and the catalogue are whose they were.
    """

    def __init__(
        self, config: Config, catalogue: Catalogue, fleet: Fleet, sessions: int, url: str,
        lease_seconds: float = DEFAULT_SECONDS, max_lease_seconds: float = MAX_SECONDS,
    ) -> None:  # fmt: skip
        """`fleet` runs `sessions` episodes of the catalogue's sites at a time; clients reach the node at `url`."""
        self.url, self.boot = url, secrets.token_hex(4)
        self.catalogue, self.fleet = catalogue, fleet
        self.measures = Measures()
        self.freed = asyncio.Event()  # a place, where there was none; for whoever announces it
        self.leases: Leases[Room] = Leases(
            sessions, self.boot, default_seconds=lease_seconds, max_seconds=max_lease_seconds
        )
        self._step_seconds = config.rollout.step_seconds
        self._view = View.of(config.browser)
        self._running: dict[str, asyncio.Task[Any]] = {}  # operations by lease
        self._sweeping: asyncio.Task[None] | None = None
        self.measures.watch(sessions, lambda: len(self.leases.held()), fleet)

    async def __aenter__(self) -> Node:
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await asyncio.gather(*(self._let_go(lease, "the node has ended") for lease in self.leases.held()))

    # Leases

    def lease(self, asked: LeaseRequest) -> Lease:
        """Give a place. Raises NoPlace, BadInput."""
        if len(asked.owner) > MAX_OWNER or not asked.owner.isprintable():
            raise BadInput(f"owner: not a line of at most {MAX_OWNER} characters")
        try:
            held = self.leases.grant(asked.seconds, asked.owner, Room(self.fleet, self._step_seconds))
        except NoPlace:
            self.measures.refused_leases.inc()
            raise
        except ValueError as error:
            raise BadInput(str(error)) from None
        self.measures.granted.inc()
        return self._lease(held)

    def renew(self, name: str) -> Lease:
        """Begin the lease's life anew. Raises NotHeld."""
        held = self.leases.find(name)
        self.leases.renew(held)
        return self._lease(held)

    async def release(self, name: str) -> None:
        """End the lease; an operation under way is broken off. Raises NotHeld."""
        await self._let_go(self.leases.find(name), "the lease has been released")

    def lease_state(self, name: str) -> LeaseState:
        """What is known of a lease. Raises NotHeld."""
        return self.described(self.leases.find(name))

    def described(self, held: Held[Room]) -> LeaseState:
        """What is known of a lease."""
        room, seen = held.place, held.place.seen
        return LeaseState(
            state=room.state, seconds_left=round(self.leases.seconds_left(held), 3), owner=held.owner, task=room.task,
            url=seen.url if seen else None, title=seen.title if seen else None, steps=room.steps,
            outcome=room.outcome, refused=room.refused,
        )  # fmt: skip

    def state(self) -> NodeState:
        """What the node says of itself."""
        held = self.leases.held()
        return NodeState(
            url=self.url, boot=self.boot, sessions=self.leases.places, free=self.leases.free, view=self._view,
            leases=tuple(lease.id for lease in held), sources=self.catalogue.environments,
        )  # fmt: skip

    # Episodes

    async def reset(self, name: str, asked: Reset, gone: Gone) -> Observation:
        """Begin an episode. Raises BrowserError, NotHeld, Conflict, BadInput."""
        held = self.leases.find(name)
        task = self.catalogue.task(asked)
        seen = await self._timed("reset", held, lambda room: room.reset(task), gone)
        self.measures.episodes.labels(task.source).inc()
        return seen

    async def step(self, name: str, action: Action, gone: Gone) -> Observation:
        """Act. Raises BrowserError, NotHeld, NoEpisode, Conflict, BadInput."""
        held = self.leases.find(name)
        checked(action)
        try:
            seen = await self._timed("step", held, lambda room: room.step(action), gone)
        except ValueError as error:  # the action lacks what its kind needs
            raise BadInput(f"{action.kind}: {error}") from error
        self.measures.steps.inc()
        return seen

    async def demonstration(self, name: str, hasty: bool, gone: Gone) -> Action:
        """What a script would do next. Raises BrowserError, NotHeld, NoEpisode, Conflict, OracleError, NoScript."""
        held = self.leases.find(name)
        task = held.place.task
        if task is None:
            raise NoEpisode("there is no episode; reset begins one")
        site = self.catalogue.sites[task.source]
        try:
            return await self._operate(held, lambda room: room.demonstration(site, hasty), gone)
        except KeyError:
            raise NoScript(f"there is no script for {task.environment} of {task.source}") from None

    async def check(self) -> str | None:
        """Why the node cannot work, if it cannot."""
        try:
            await self.fleet.check(CHECK_SECONDS)
        except BrowserError as error:
            return str(error)
        return None

    def latest(self, name: str) -> Observation:
        """The latest observation of a lease's episode. Raises NotHeld, NoEpisode."""
        held = self.leases.find(name)
        self.leases.renew(held)
        if held.place.seen is None:
            raise NoEpisode("there is no screenshot yet; reset begins an episode")
        return held.place.seen

    async def _timed(
        self, name: str, held: Held[Room], work: Callable[[Room], Coroutine[Any, Any, T]], gone: Gone
    ) -> T:
        started = time.monotonic()
        try:
            result = await self._operate(held, work, gone)
        except BrowserError as error:
            self.measures.errors.labels(error.outcome).inc()
            log.warning("%s of %s failed, %s: %s", name, held.owner or "a lease", error.outcome, error)
            raise
        self.measures.seconds.labels(name).observe(time.monotonic() - started)
        return result

    async def _operate(self, held: Held[Room], work: Callable[[Room], Coroutine[Any, Any, T]], gone: Gone) -> T:
        """The only operation of a lease at a time. It is broken off when the client goes away or the lease is released.

        A client that has gone away does not prolong its lease by what it had begun.
        """
        if held.busy:
            raise Conflict("another operation of this lease is under way; wait for its answer")
        held.busy = True
        self.leases.renew(held)
        running = self._running[held.id] = asyncio.ensure_future(work(held.place))
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
                raise Conflict("the operation was broken off")
            return running.result()
        finally:
            leaving.cancel()
            running.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
            del self._running[held.id]
            held.busy = False

    # Ends

    async def _let_go(self, held: Held[Room], reason: str) -> None:
        was_full = not self.leases.free
        if not self.leases.release(held, reason):
            return
        running = self._running.get(held.id)
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await held.place.end()
        if was_full:
            self.freed.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            was_full = not self.leases.free
            for held in self.leases.sweep():
                self.measures.expired.inc()
                log.info("a lease of %s has expired", held.owner or "someone")
                await held.place.end()
            if was_full and self.leases.free:
                self.freed.set()

    def _lease(self, held: Held[Room]) -> Lease:
        return Lease(held.id, held.seconds, self.url)
