"""Browser sessions on demand: each serves one episode in its own context on one of a few Chromiums."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from megatron_webrl.browser.chromium import Chromium, find_chromium, launch_arguments
from megatron_webrl.browser.egress.egress_policy import NetworkAccess, declared_endpoints
from megatron_webrl.browser.egress.egress_proxy import REPLAY_KEY_DIGEST, EgressProxy
from megatron_webrl.browser.egress.har import check_har_settings
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.isolation import Isolation
from megatron_webrl.browser.session import Session, context_options
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.control import child_process
from megatron_webrl.types import Observation, Task, TaskSite
from megatron_webrl.util.network import listen, start_relay

log = logging.getLogger(__name__)
T = TypeVar("T")

SESSION_ATTEMPTS = 2  # to prepare a session, and to reset one for an episode; a cached one does not count
SESSIONS_PER_BROWSER = 16  # more browsers cost memory, mostly for drivers; a crash costs all sessions of a browser
HEALTH_CHECK_SECONDS = 10.0  # between two checks of all browsers
ANSWER_SECONDS = 5.0  # of a browser, to a question about the pool's health
RECYCLE_MIB = 6144  # a browser grown by more since its launch, driver and open sessions included, is replaced
PAGE_MIB = 2048  # memory limit of a renderer process: the page crashes beyond it


@dataclass
class BrowserPoolCounters:
    """Totals since the pool started."""

    launches: int = 0
    failed_launches: int = 0
    crashes: int = 0  # browsers that ended unexpectedly, or whose driver did
    hangs: int = 0  # browsers killed because they did not answer
    recycled_by_memory: int = 0
    recycled_by_stuck_contexts: int = 0  # browsers replaced because a context did not open or close
    sessions: int = 0  # handed out
    sessions_reused: int = 0  # begun in the page of an earlier episode
    sessions_lost: int = 0  # ended by a crash, a hang or a time limit
    recordings: int = 0  # episodes whose recording was saved
    failed_recordings: int = 0  # episodes whose recording could not be saved
    retries: int = 0  # sessions replaced before their episode began, because preparing or resetting them failed


@dataclass(eq=False)
class BrowserInstance:
    """One Chromium of the pool and its sessions in use; it serves until it drains or fails."""

    chromium: Chromium
    load: int = 0  # sessions in use, including those a caller is waiting for
    sessions: set[Session] = field(default_factory=set)  # in use
    draining: bool = False
    failed: bool = False


class BrowserPool:
    """At most `sessions` concurrent episodes, spread over the browsers by load.

    Example: `async with pool.episode(task) as (session, observation): await session.step(action)`. A browser that
    crashes or hangs loses its sessions, which raise BrowserCrashed, and is replaced at once; the others continue. One
    that has grown or cannot close a context is replaced, too, and ends with its last session.
    """

    def __init__(
        self, settings: BrowserConfig, sites: Mapping[str, TaskSite], sessions: int, step_seconds: float = 120.0
    ) -> None:
        """`sites` by the name of the task source. Raises BrowserMissing, ConfigError."""
        check_har_settings(settings)
        self._executable = find_chromium(settings.executable)
        self._settings, self._sites, self._step_seconds = settings, sites, step_seconds
        self._limit = asyncio.Semaphore(sessions)
        self.counters = BrowserPoolCounters()
        self.egress_proxy = EgressProxy(settings)
        self._isolation = Isolation.from_config(settings)
        self._declared = {name: declared_endpoints(site.origins, site.addresses) for name, site in sites.items()}
        self._count = 0 if settings.cdp else -(-sessions // SESSIONS_PER_BROWSER)
        self._serving: list[BrowserInstance] = []
        self._draining: set[BrowserInstance] = set()  # each ends with its last session
        self._cached: dict[Session, BrowserInstance] = {}  # idle, for a later episode in the same page; oldest first
        self._launching: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._watch_task: asyncio.Task[None] | None = None
        self._closing = False
        self._closed_port: socket.socket | None = None

    async def start(self) -> None:
        """Remove leftovers of killed processes, and launch the browsers. Raises BrowserError."""
        removed = await asyncio.to_thread(lambda: child_process.sweep_orphans() + child_process.sweep_scratch())
        if removed:
            log.info("removed leftovers of killed processes: %s", ", ".join(removed))
        # Bound but not listening: connections to this local port are refused, and no other process can listen on it.
        self._closed_port = socket.socket()
        self._closed_port.bind(("127.0.0.1", 0))
        self._launch_missing()
        await asyncio.gather(*self._launching)
        self._watch_task = asyncio.get_running_loop().create_task(self._watch(), name="health check")
        self._watch_task.add_done_callback(_log_failure)

    async def close(self) -> None:
        """End all sessions, browsers and processes within a limit."""
        self._closing = True
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        for browser in self.browsers:
            self._release_cached(browser)
        # Not cancelled: every task has its own limits, and a driver stopped half-way cannot be stopped again.
        while unfinished := [*self._launching, *self._background]:
            await asyncio.gather(*unfinished, return_exceptions=True)
        browsers, self._serving, self._draining = self.browsers, [], set()
        await asyncio.gather(*(browser.chromium.close(graceful=not browser.failed) for browser in browsers))
        if self._closed_port is not None:
            self._closed_port.close()
        self.egress_proxy.close()
        if self._isolation is not None:
            self._isolation.close()

    async def __aenter__(self) -> BrowserPool:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def browsers(self) -> list[BrowserInstance]:
        """Serving and draining browsers."""
        return [*self._serving, *self._draining]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A fresh session for one episode. Waits while `sessions` are in use. Raises BrowserError."""
        async with self._limit:
            browser, session = await self._acquire()
            try:
                yield session
            finally:
                self._start_release(browser, session)

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[tuple[Session, Observation]]:
        """A session, fresh or reused (browser.reuse_pages), and the first observation of the task.

        Waits while `sessions` are in use. A reset that fails because of the browser is tried again, but
        not after a time limit that the site may have caused. Raises BrowserError, KeyError for an unknown source.
        """
        async with self._limit:
            browser, session, observation = await self._begin(task)
            try:
                yield session, observation
            finally:
                if self._settings.reuse_pages and not self._closing and not browser.draining and session.reusable:
                    self._cached[session] = browser
                    for evicted in list(self._cached)[: max(0, len(self._cached) - self._settings.reuse_pages)]:
                        self._start_release(self._cached.pop(evicted), evicted)
                else:
                    self._start_release(browser, session)

    async def health_problem(self) -> str | None:
        """Why no browser answers within ANSWER_SECONDS; None if one does. One that does not is replaced."""
        if self._settings.cdp:
            return None  # each episode starts its own
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return None if await self._check(await self._least_loaded()) else "Chromium does not answer"
        except TimeoutError:
            return f"no browser answered within {ANSWER_SECONDS} s"
        except BrowserError as error:
            return str(error)

    def gauges(self) -> dict[str, float]:
        """Current counts; memory, drivers included, as of the latest health check."""
        browsers = self.browsers
        return {
            "sessions_in_use": float(sum(browser.load for browser in browsers) - len(self._cached)),
            "sessions_cached": float(len(self._cached)),
            "browsers": float(len(self._serving)),
            "browsers_draining": float(len(self._draining)),
            "resident_mib": sum(browser.chromium.resident_mib for browser in browsers),
        }

    # Sessions

    async def _begin(self, task: Task) -> tuple[BrowserInstance, Session, Observation]:
        attempts = 0
        while True:
            cached = self._take_cached(task)
            attempts += cached is None
            browser, session = cached or await self._acquire()
            try:
                observation = await session.reset(task)
            except BaseException as error:
                self._start_release(browser, session)
                stale = cached is not None and isinstance(error, BrowserError)
                if not stale and (attempts == SESSION_ATTEMPTS or not await self._is_browser_fault(browser, error)):
                    raise
                self.counters.retries += 1
                log.warning("reset of %s failed; trying another session: %s", task.id, error)
                continue
            if cached:
                self.counters.sessions += 1
                self.counters.sessions_reused += 1
            return browser, session, observation

    def _take_cached(self, task: Task) -> tuple[BrowserInstance, Session] | None:
        """Take a session last used for the task's environment, else for its source; None if there is neither."""
        same_source = [session for session in self._cached if session.task and session.task.source == task.source]
        same_source.sort(key=lambda session: session.task is None or session.task.environment != task.environment)
        return (self._cached.pop(same_source[0]), same_source[0]) if same_source else None

    async def _is_browser_fault(self, browser: BrowserInstance, error: BaseException) -> bool:
        if isinstance(error, BrowserTimeout):
            return not await self._check(browser)
        crashed = isinstance(error, BrowserError) and not browser.chromium.alive
        return crashed or isinstance(error, BrowserCrashed | PageCrashed)

    async def _open_network(self) -> NetworkAccess:
        listener = self._isolation.listen() if self._isolation is not None else None
        return await self.egress_proxy.open_port({}, listener)

    async def _prepare(self, browser: BrowserInstance | None) -> tuple[BrowserInstance, Session]:
        """Prepare a session, of its own browser without one, and take it into use. Raises BrowserError."""
        network = None
        if browser is not None:
            browser.load += 1
        try:
            network = await self._open_network()
            if browser is None:
                browser = await self._start_browser(network)
                browser.load, browser.draining = 1, True
                self._draining.add(browser)
            chromium = browser.chromium
            session = await Session.prepare(
                chromium.browser, self._settings, self._sites, self._declared, self._step_seconds, network,
                chromium.context,
            )  # fmt: skip
            if chromium.context is not None:
                await self._make_controllable(session, chromium.cdp_port)
        except BaseException:
            if browser is not None:
                browser.load -= 1
                self._close_if_drained(browser)
            if network is not None:
                await network.close()
            raise
        browser.sessions.add(session)
        return browser, session

    async def _make_controllable(self, session: Session, port: int) -> None:
        """Set the address at which programs of this machine control a browser; `port` of CDP in its own network."""
        reachable = port
        if self._isolation is not None and (namespace := self._isolation.namespace) is not None:

            async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                return await asyncio.open_connection(sock=await asyncio.to_thread(namespace.connect, port))

            session.cdp_relay = await start_relay(listen(), connect)
            reachable = session.cdp_relay.sockets[0].getsockname()[1]
        session.cdp_address = f"http://127.0.0.1:{reachable}"

    async def _acquire(self) -> tuple[BrowserInstance, Session]:
        attempts = 0
        while True:
            shared = None if self._settings.cdp else await self._least_loaded()
            attempts += 1
            opening = self._run_in_background(self._prepare(shared))
            try:
                browser, session = await asyncio.shield(opening)
            except BrowserError as error:
                if shared is not None:
                    await self._replace_stuck(shared, str(error))
                if attempts == SESSION_ATTEMPTS:
                    raise
                self.counters.retries += 1
                log.warning("%s; trying again", error)
                continue
            except asyncio.CancelledError:
                self._run_in_background(self._discard(opening))
                raise
            session.lost.add_done_callback(partial(self._on_lost, browser, session))
            self.counters.sessions += 1
            return browser, session

    async def _least_loaded(self) -> BrowserInstance:
        """The browser with the fewest sessions; waits for a launch if none is serving. Raises BrowserCrashed."""
        while not self._serving:
            self._launch_missing()
            launching = set(self._launching)
            if not launching:
                raise BrowserCrashed("the browser pool is not open")
            await asyncio.wait(launching, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in launching if task.done()]
            if not self._serving and failures and failures[0] is not None:
                raise failures[0]
        return min(self._serving, key=lambda browser: browser.load)

    async def _discard(self, opening: asyncio.Task[tuple[BrowserInstance, Session]]) -> None:
        """Release a session whose caller was cancelled while it was prepared."""
        with suppress(BrowserError):
            await self._release(*await opening)

    def _start_release(self, browser: BrowserInstance, session: Session) -> None:
        self._run_in_background(self._release(browser, session))  # takes time; no caller waits

    async def _release(self, browser: BrowserInstance, session: Session) -> None:
        browser.sessions.discard(session)
        ends = browser.chromium.context is not None and browser in self._draining  # with its only context
        if ends:
            self._draining.discard(browser)
        try:
            closed = await session.close()
        finally:
            browser.load -= 1
            if ends:
                await browser.chromium.close()
        if not closed:  # its renderers end only with the browser
            await self._replace_stuck(browser, "a context did not close")
        if session.recording_saved is not None:
            self.counters.recordings += session.recording_saved
            self.counters.failed_recordings += not session.recording_saved
        self._close_if_drained(browser)

    def _release_cached(self, browser: BrowserInstance) -> None:
        """Release the idle sessions of a browser that is about to end."""
        for session in [session for session, owner in self._cached.items() if owner is browser]:
            del self._cached[session]
            browser.sessions.discard(session)  # not in use: no episode is lost with it
            self._start_release(browser, session)

    def _on_lost(self, browser: BrowserInstance, session: Session, lost: asyncio.Future[BrowserError]) -> None:
        if session not in browser.sessions:
            return  # already released
        if self._cached.pop(session, None) is not None:
            self._start_release(browser, session)
            return
        self.counters.sessions_lost += 1
        if isinstance(lost.result(), BrowserTimeout):
            self._run_in_background(self._check(browser))

    def _run_in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine that `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # Launch

    def _launch_missing(self) -> None:
        while len(self._serving) + len(self._launching) < self._count and not self._closing:
            task = asyncio.get_running_loop().create_task(self._launch(), name="browser launch")
            self._launching.add(task)
            task.add_done_callback(self._launching.discard)
            task.add_done_callback(_log_failure)

    async def _launch(self) -> None:
        """Launch a browser for many episodes. Raises BrowserCrashed."""
        self._serving.append(await self._start_browser())

    async def _start_browser(self, network: NetworkAccess | None = None) -> BrowserInstance:
        """Launch a browser, for one episode if it has a `network`. Raises BrowserCrashed."""
        assert self._closed_port is not None, "start() must come before session()"
        proxy_port = self._closed_port.getsockname()[1] if network is None else network.port
        arguments = launch_arguments(
            proxy_port, still_images=bool(self._settings.record or self._settings.replay),
            trusted_key=REPLAY_KEY_DIGEST if self._settings.replay else "",
        )  # fmt: skip
        only_context = None if network is None else context_options(self._settings, network)
        self.counters.launches += 1
        try:
            chromium = await Chromium.launch(self._executable, arguments, PAGE_MIB, self._isolation, only_context)
        except BrowserCrashed:
            self.counters.failed_launches += 1
            raise
        browser = BrowserInstance(chromium)
        chromium.on_exit(partial(self._on_exit, browser))
        return browser

    # Replacement

    def _replace(self, browser: BrowserInstance, reason: str) -> bool:
        """Drain a working browser and launch another; False if it drains already."""
        if browser.draining or self._closing:
            return False
        log.info("replacing a browser: %s", reason)
        self._drain(browser)
        self._launch_missing()
        return True

    async def _replace_stuck(self, browser: BrowserInstance, reason: str) -> None:
        """Replace a browser that answers but did not open or close a context."""
        if await self._check(browser) and self._replace(browser, reason):
            self.counters.recycled_by_stuck_contexts += 1

    def _replace_largest(self) -> None:
        """Replace the browser that has grown most if it exceeds RECYCLE_MIB; one at a time."""
        if not self._serving or self._launching or len(self._draining) >= self._count:
            return
        browser = max(self._serving, key=lambda browser: browser.chromium.growth_mib)
        growth = browser.chromium.growth_mib
        if growth > RECYCLE_MIB and self._replace(browser, f"it has grown by {growth:.0f} MiB"):
            self.counters.recycled_by_memory += 1

    def _on_exit(self, browser: BrowserInstance, reason: str) -> None:
        if browser in self.browsers:
            self.counters.crashes += 1
            self._fail(browser, reason)

    def _fail(self, browser: BrowserInstance, reason: str) -> None:
        browser.failed = True
        self._drain(browser)
        log.warning("%s; %d sessions are lost", reason, len(browser.sessions))
        for session in browser.sessions:
            session.mark_lost(BrowserCrashed(reason))
        self._launch_missing()

    def _drain(self, browser: BrowserInstance) -> None:
        """Give a browser no more sessions; it ends with its last session, or at once if it has failed."""
        browser.draining = True
        self._release_cached(browser)
        if browser in self._serving:
            self._serving.remove(browser)
            self._draining.add(browser)
        self._close_if_drained(browser)

    def _close_if_drained(self, browser: BrowserInstance) -> None:
        if browser in self._draining and (browser.failed or not browser.load):
            self._draining.discard(browser)
            self._run_in_background(browser.chromium.close(graceful=not browser.failed))

    # Health check

    async def _check(self, browser: BrowserInstance) -> bool:
        """Whether a browser answers; one that does not is killed and replaced."""
        if browser.failed:
            return False
        responsive = await browser.chromium.is_responsive()
        if not responsive and not browser.failed and browser in self.browsers:
            if browser.chromium.alive:
                self.counters.hangs += 1
                self._fail(browser, "Chromium does not answer")
            else:
                self._on_exit(browser, "Chromium or its driver has ended")
        return responsive

    async def _watch(self) -> None:
        """Check, measure and replace browsers until the pool closes."""
        while True:
            await asyncio.sleep(HEALTH_CHECK_SECONDS)
            browsers = self.browsers
            await asyncio.gather(*(self._check(browser) for browser in browsers))
            for browser in browsers:
                await asyncio.to_thread(browser.chromium.measure_memory)
            self._replace_largest()
            self._launch_missing()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed: %s", task.get_name(), task.exception())
