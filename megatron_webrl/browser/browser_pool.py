"""Browser sessions on demand: warm contexts on a few Chromiums, each used for one episode, then replaced."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from megatron_webrl.browser.browser_instance import BrowserInstance
from megatron_webrl.browser.chromium import find_chromium, launch_arguments, proxy_settings
from megatron_webrl.browser.chromium_process import Chromium
from megatron_webrl.browser.egress.egress_policy import Endpoint, declared_endpoints, direct_endpoints
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.browser.egress.har import check_har_settings
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.pool_counters import BrowserPoolCounters
from megatron_webrl.browser.process_memory import pids_by_process_group
from megatron_webrl.browser.session import Session
from megatron_webrl.browser.session_cache import SessionCache
from megatron_webrl.browser.task_page import TaskPage
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.system import child_process
from megatron_webrl.types import Observation, Task

log = logging.getLogger(__name__)

LAUNCH_ATTEMPTS = 3
LAUNCH_BACKOFF_SECONDS = 0.5  # seconds before the second attempt, twice as long before each further one
ACQUIRE_ATTEMPTS = 3
RESET_ATTEMPTS = 2
SESSIONS_PER_WARM_CONTEXT = 4  # one context is kept ready for so many sessions
SESSIONS_PER_BROWSER = 16
"""Where browser.browsers=0. Each browser costs memory, its driver above all; a crash costs all sessions of one."""

HEALTH_CHECK_SECONDS = 10.0
"""So often browsers are measured, and asked whether they are there."""


class BrowserPool:
    """At most `sessions` episodes at a time, dealt out over its browsers by load.

    Example: `async with fleet.episode(task) as (session, seen): await session.step(action)`. A session that was in use
    when its browser crashed raises BrowserCrashed; others go on, and another browser takes over. A browser that has
    served many sessions or has grown gets no new ones once its successor is up, and ends with the last of its own.
    """

    def __init__(
        self, settings: BrowserConfig, sites: Mapping[str, TaskPage], sessions: int, step_seconds: float = 120.0
    ) -> None:
        """`sites` by the name of the task source. Raises BrowserMissing, ConfigError."""
        check_har_settings(settings)
        self._executable = find_chromium(settings.executable)
        self._settings, self._sites, self._step_seconds = settings, sites, step_seconds
        self._limit = asyncio.Semaphore(sessions)
        self._browsers = settings.browsers or -(-sessions // SESSIONS_PER_BROWSER)
        self._warm_each = -(-sessions // (SESSIONS_PER_WARM_CONTEXT * self._browsers))
        self._kept = SessionCache(settings.reuse_pages)
        self._serving: list[BrowserInstance] = []
        self._draining: set[BrowserInstance] = set()  # they end when their last session does
        self._launching: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._closing = False
        self._closed_port: socket.socket | None = None
        self.egress_proxy = EgressProxy(settings)
        self._declared: dict[Endpoint, Endpoint] = {}
        for site in sites.values():
            self._declared |= declared_endpoints(site.origins, site.addresses)
        # Past the gateway nothing would hold a replayed page back.
        self._direct = {} if settings.replay else direct_endpoints(self._declared, self.egress_proxy.egress_policy)
        self.counters = BrowserPoolCounters()

    async def start(self) -> None:
        """Remove what killed processes have left, launch the browsers and prepare contexts. Raises BrowserError."""
        removed = await asyncio.to_thread(lambda: child_process.sweep_orphans() + child_process.sweep_scratch())
        if removed:
            log.info("removed what a killed process had left: %s", ", ".join(removed))
        # Bound but not listening: a port of this machine where connections are refused and nobody else can listen.
        self._closed_port = socket.socket()
        self._closed_port.bind(("127.0.0.1", 0))
        self._complete()
        await asyncio.gather(*self._launching)
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="watch")
        self._watching.add_done_callback(_tell_failure)

    async def close(self) -> None:
        """Close everything within a limit; no process is left."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for carrier in (*self._serving, *self._draining):
            self._release_kept(carrier)
        # Left to end by itself: each part of it has a limit, and a driver stopped half-way cannot be stopped again.
        while unfinished := [*self._launching, *self._background]:
            await asyncio.gather(*unfinished, return_exceptions=True)
        everyone, self._serving, self._draining = {*self._serving, *self._draining}, [], set()
        await asyncio.gather(*(carrier.close() for carrier in everyone))
        self.egress_proxy.close()
        if self._closed_port is not None:
            self._closed_port.close()

    async def __aenter__(self) -> BrowserPool:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A fresh session for one episode. Waits while `sessions` are in use. Raises BrowserError."""
        async with self._limit:
            carrier, session = await self._take()
            try:
                yield session
            finally:
                # Closing takes a while and nobody needs to wait for it.
                self._do(self._release(carrier, session))

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[tuple[Session, Observation]]:
        """A session, fresh or kept (browser.reuse_pages), and the first observation of the task.

        Waits while `sessions` are in use. A reset that fails by the browser's fault is tried again in another session,
        RESET_ATTEMPTS times altogether; a limit that the task's site may have missed is nobody's fault. Raises
        BrowserError, KeyError for an unknown source.
        """
        async with self._limit:
            carrier, session, seen = await self._begin(task)
            try:
                yield session, seen
            finally:
                self._part(carrier, session)

    async def check_health(self, seconds: float) -> None:
        """Have a browser answer within `seconds`; one that does not is replaced. Raises BrowserError."""
        try:
            async with asyncio.timeout(seconds):
                if not await self._check(await self._carrier()):
                    raise BrowserCrashed("Chromium does not answer")
        except TimeoutError:
            raise BrowserTimeout(f"no browser answered within {seconds} s") from None

    def gauges(self) -> dict[str, float]:
        """How things stand; memory as it was up to LOOK_SECONDS ago, drivers included."""
        everyone = [*self._serving, *self._draining]
        return {
            "sessions_in_use": float(sum(carrier.load for carrier in everyone) - len(self._kept)),
            "sessions_cached": float(len(self._kept)),
            "sessions_warm": float(sum(carrier.ready_count for carrier in self._serving)),
            "browsers": float(len(self._serving)),
            "browsers_draining": float(len(self._draining)),
            "resident_mib": sum(carrier.chromium.resident_mib for carrier in everyone),
        }

    # Sessions

    async def _begin(self, task: Task) -> tuple[BrowserInstance, Session, Observation]:
        if kept := self._kept.pop_for(task):
            try:
                seen = await kept[1].reset(task)
            except BaseException as error:
                self._do(self._release(*kept))
                if not isinstance(error, BrowserError):
                    raise
                self.counters.retries += 1
                log.warning("reset of %s in a used page is tried again in a fresh one: %s", task.id, error)
            else:
                self.counters.sessions_reused += 1
                self._count(kept[0])
                return *kept, seen
        for attempt in range(RESET_ATTEMPTS):
            carrier, session = await self._take()
            try:
                return carrier, session, await session.reset(task)
            except BaseException as error:
                self._do(self._release(carrier, session))
                if attempt == RESET_ATTEMPTS - 1 or not await self._is_browsers_fault(carrier, error):
                    raise
                self.counters.retries += 1
                log.warning("reset of %s is tried again in another session: %s", task.id, error)
        raise AssertionError("unreachable")

    async def _is_browsers_fault(self, carrier: BrowserInstance, error: BaseException) -> bool:
        if isinstance(error, BrowserTimeout):
            return not await self._check(carrier)
        crashed = isinstance(error, BrowserError) and not carrier.chromium.alive
        return crashed or isinstance(error, BrowserCrashed | PageCrashed)

    async def _take(self) -> tuple[BrowserInstance, Session]:
        reason: BrowserError | None = None
        for _ in range(ACQUIRE_ATTEMPTS):
            carrier = await self._carrier()
            try:
                session = await carrier.acquire()
            except BrowserError as error:
                reason = error
                self.counters.retries += 1
                log.warning("%s; trying again", error)
                if await self._check(carrier) and self._replace(carrier, str(error)):
                    self.counters.recycled_by_stuck_contexts += 1
                continue
            finally:
                self._end_if_done(carrier)
            session.lost.add_done_callback(partial(self._lost, carrier, session))
            self._count(carrier)
            return carrier, session
        raise BrowserCrashed(f"no session in {ACQUIRE_ATTEMPTS} attempts; the last one: {reason}") from reason

    def _count(self, carrier: BrowserInstance) -> None:
        """A session of this browser was handed out."""
        self.counters.sessions += 1
        carrier.episodes_served += 1
        old = carrier.episodes_served >= self._settings.recycle_episodes and not self._launching
        if old and self._replace(carrier, f"it has served {carrier.episodes_served} episodes"):
            self.counters.recycled_by_episodes += 1

    async def _carrier(self) -> BrowserInstance:
        """The least loaded browser; waits if there is none at the moment. Raises BrowserCrashed."""
        while not self._serving:
            self._complete()
            launching = set(self._launching)
            if not launching:
                raise BrowserCrashed("the fleet is not open")
            await asyncio.wait(launching, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in launching if task.done()]
            if not self._serving and failures and failures[0] is not None:
                raise failures[0]
        return min(self._serving, key=lambda carrier: (carrier.load, -carrier.ready_count))

    def _part(self, carrier: BrowserInstance, session: Session) -> None:
        """An episode is over: keep its session or close it, which takes a while and nobody needs to wait for."""
        staying = carrier in self._serving and not carrier.replacement_started and not self._closing
        if self._settings.reuse_pages and staying and session.reusable:
            for released in self._kept.put(carrier, session):
                self._do(self._release(*released))
        else:
            self._do(self._release(carrier, session))

    def _release_kept(self, carrier: BrowserInstance) -> None:
        for _, session in self._kept.evict_browser(carrier):
            carrier.sessions.discard(session)  # in use no longer: whatever comes, no episode is lost
            self._do(self._release(carrier, session))

    async def _release(self, carrier: BrowserInstance, session: Session) -> None:
        closed = await carrier.release(session)
        # What does not close takes its renderers along only when the browser ends.
        if not closed and await self._check(carrier) and self._replace(carrier, "a context did not close"):
            self.counters.recycled_by_stuck_contexts += 1
        self._end_if_done(carrier)

    def _lost(self, carrier: BrowserInstance, session: Session, lost: asyncio.Future[BrowserError]) -> None:
        if session not in carrier.sessions:
            return  # it was released before
        if self._kept.discard(session):
            self._do(self._release(carrier, session))
            return
        self.counters.sessions_lost += 1
        if isinstance(lost.result(), BrowserTimeout):
            self._do(self._check(carrier))

    # Browsers

    def _complete(self) -> None:
        """Launch as many browsers as are missing."""
        while len(self._serving) + len(self._launching) < self._browsers and not self._closing:
            self._launch_for(None)

    def _replace(self, carrier: BrowserInstance, reason: str) -> bool:
        """Launch a successor, to which a browser that still works gives way; False if that was done before."""
        if carrier not in self._serving or carrier.replacement_started or self._closing:
            return False
        log.info("a browser is replaced: %s", reason)
        carrier.replacement_started = True
        self._launch_for(carrier)
        return True

    def _launch_for(self, old: BrowserInstance | None) -> None:
        task = asyncio.get_running_loop().create_task(self._launch(old), name="launch of a browser")
        self._launching.add(task)

        def launched(task: asyncio.Task[None]) -> None:
            self._launching.discard(task)
            if task.exception() is None:
                self._complete()  # others may have ended meanwhile
            elif old is not None:
                old.replacement_started = False  # it goes on for now

        task.add_done_callback(launched)
        task.add_done_callback(_tell_failure)

    async def _launch(self, old: BrowserInstance | None) -> None:
        """Add a browser; `old` leaves when it is there. Raises BrowserCrashed."""
        assert self._closed_port is not None, "start() comes before session()"
        arguments = launch_arguments(self._direct, self._closed_port.getsockname()[1])
        for attempt in range(LAUNCH_ATTEMPTS):
            try:
                self.counters.launches += 1
                chromium = await Chromium.launch(self._executable, arguments, self._settings.page_mib)
                break
            except BrowserCrashed:
                self.counters.failed_launches += 1
                if attempt == LAUNCH_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(LAUNCH_BACKOFF_SECONDS * 2**attempt)
        carrier = BrowserInstance(chromium, self._warm_each, self._prepare)
        self._serving.append(carrier)
        chromium.on_exit(partial(self._ended, carrier))
        carrier.refill()
        if old is not None:
            self._drain(old)

    async def _prepare(self, chromium: Chromium) -> Session:
        access = await self.egress_proxy.open_port(self._declared)
        try:
            proxy = proxy_settings(access.port, self._direct)
            return await Session.prepare(
                chromium.browser, self._settings, self._sites, self._step_seconds, access, proxy
            )
        except BaseException:
            await access.close()
            raise

    def _ended(self, carrier: BrowserInstance, reason: str) -> None:
        """A browser or its driver has ended, invited or not."""
        if carrier in self._serving or carrier in self._draining:
            self.counters.crashes += 1
            self._fail(carrier, reason)

    def _fail(self, carrier: BrowserInstance, reason: str) -> None:
        self._release_kept(carrier)
        log.warning("%s; %d sessions are lost", reason, len(carrier.sessions))
        carrier.fail(reason)
        self._drain(carrier)
        self._complete()

    def _drain(self, carrier: BrowserInstance) -> None:
        """Give a browser no more sessions; it ends with its last one, or at once if it has failed."""
        carrier.drain()
        self._release_kept(carrier)
        if carrier in self._serving:
            self._serving.remove(carrier)
            self._draining.add(carrier)
        self._end_if_done(carrier)

    def _end_if_done(self, carrier: BrowserInstance) -> None:
        if carrier in self._draining and (carrier.failed or not carrier.load):
            self._draining.discard(carrier)
            self._do(carrier.close())

    async def _check(self, carrier: BrowserInstance) -> bool:
        """Whether a browser answers; one that does not is killed and replaced."""
        if carrier.failed:
            return False
        answers = await carrier.is_responsive()
        if not answers and not carrier.failed and (carrier in self._serving or carrier in self._draining):
            if carrier.chromium.alive:
                self.counters.hangs += 1
                self._fail(carrier, "Chromium does not answer")
            else:
                self._ended(carrier, "Chromium or its driver has ended")
        return answers

    async def _watch(self) -> None:
        """Look after the browsers for as long as the fleet is open."""
        while True:
            await asyncio.sleep(HEALTH_CHECK_SECONDS)
            everyone = [*self._serving, *self._draining]
            await asyncio.gather(*(self._check(carrier) for carrier in everyone))
            await asyncio.to_thread(_measure, [carrier.chromium for carrier in everyone])
            self._replace_grown()
            self._complete()
            for carrier in list(self._serving):
                await carrier.discard_failed()
                carrier.refill()

    def _replace_grown(self) -> None:
        """Replace the browser that has grown most, if it has grown too much; one at a time."""
        if not self._serving or self._launching or len(self._draining) >= self._browsers:
            return
        carrier = max(self._serving, key=lambda carrier: carrier.chromium.growth_mib)
        grown = carrier.chromium.growth_mib
        if grown > self._settings.recycle_mib and self._replace(carrier, f"it has grown by {grown:.0f} MiB"):
            self.counters.recycled_by_memory += 1

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _tell_failure(task: asyncio.Task[None]) -> None:
    """Log what ended a task that nobody may be waiting for."""
    if not task.cancelled() and task.exception() is not None:
        log.error("the fleet's %s failed: %s", task.get_name(), task.exception())


def _measure(browsers: list[Chromium]) -> None:
    groups = pids_by_process_group()
    for chromium in browsers:
        chromium.measure_memory(groups)
