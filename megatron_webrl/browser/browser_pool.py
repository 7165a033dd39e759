"""Browser sessions on demand: each serves one episode in its own context on one of a few Chromiums."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from megatron_webrl.browser.browser_instance import BrowserInstance
from megatron_webrl.browser.browser_supervisor import BrowserSupervisor
from megatron_webrl.browser.chromium import find_chromium, launch_arguments
from megatron_webrl.browser.chromium_process import Chromium
from megatron_webrl.browser.egress import replay_certificate
from megatron_webrl.browser.egress.egress_policy import declared_endpoints
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.browser.egress.har_archive import check_har_settings
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.isolation import Isolation
from megatron_webrl.browser.pool_counters import BrowserPoolCounters
from megatron_webrl.browser.session import Session
from megatron_webrl.browser.session_cache import SessionCache
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Observation, Task, TaskSite
from megatron_webrl.util import child_process

log = logging.getLogger(__name__)

ACQUIRE_ATTEMPTS = 3
RESET_ATTEMPTS = 2
SESSIONS_PER_WARM_CONTEXT = 4  # one context is kept ready for this many sessions
SESSIONS_PER_BROWSER = 16  # more browsers cost memory, mostly for drivers; a crash costs all sessions of a browser


class BrowserPool:
    """At most `sessions` concurrent episodes, spread over the browsers by load.

    Example: `async with pool.episode(task) as (session, observation): await session.step(action)`. A session in use
    when its browser crashes raises BrowserCrashed; sessions on other browsers continue, and the browser is replaced.
    """

    def __init__(
        self, settings: BrowserConfig, sites: Mapping[str, TaskSite], sessions: int, step_seconds: float = 120.0
    ) -> None:
        """`sites` by the name of the task source. Raises BrowserMissing, ConfigError."""
        check_har_settings(settings)
        executable = find_chromium(settings.executable)
        self._settings, self._sites, self._step_seconds = settings, sites, step_seconds
        self._limit = asyncio.Semaphore(sessions)
        self._cache = SessionCache(settings.reuse_pages)
        self.egress_proxy = EgressProxy(settings)
        self._isolation = Isolation.from_config(settings)
        self._declared = {name: declared_endpoints(site.origins, site.addresses) for name, site in sites.items()}
        self.counters = BrowserPoolCounters()
        browsers = -(-sessions // SESSIONS_PER_BROWSER)
        warm_each = -(-sessions // (SESSIONS_PER_WARM_CONTEXT * browsers))
        still_images = bool(settings.record or settings.replay)
        trusted_key = replay_certificate.KEY_DIGEST if settings.replay else ""
        arguments = partial(launch_arguments, still_images=still_images, trusted_key=trusted_key)
        self._browsers = BrowserSupervisor(
            executable,
            arguments,
            browsers,
            warm_each,
            self._prepare,
            self._release_cached,
            self.counters,
            self._isolation,
        )

    async def start(self) -> None:
        """Remove leftovers of killed processes, launch the browsers and prepare contexts. Raises BrowserError."""
        removed = await asyncio.to_thread(lambda: child_process.sweep_orphans() + child_process.sweep_scratch())
        if removed:
            log.info("removed leftovers of killed processes: %s", ", ".join(removed))
        await self._browsers.start()

    async def close(self) -> None:
        """End all sessions, browsers and processes within a limit."""
        await self._browsers.close()
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

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A fresh session for one episode. Waits while `sessions` are in use. Raises BrowserError."""
        async with self._limit:
            browser, session = await self._acquire()
            try:
                yield session
            finally:
                self._browsers.run_in_background(self._release(browser, session))  # takes time; no caller waits

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[tuple[Session, Observation]]:
        """A session, fresh or reused (browser.reuse_pages), and the first observation of the task.

        Waits while `sessions` are in use. A reset that fails because of the browser is tried RESET_ATTEMPTS times, but
        not after a time limit that the site may have caused. Raises BrowserError, KeyError for an unknown source.
        """
        async with self._limit:
            browser, session, observation = await self._begin(task)
            try:
                yield session, observation
            finally:
                self._end(browser, session)

    async def check_health(self, seconds: float) -> None:
        """Wait up to `seconds` for a browser to answer; one that does not is replaced. Raises BrowserError."""
        try:
            async with asyncio.timeout(seconds):
                if not await self._browsers.check(await self._browsers.least_loaded()):
                    raise BrowserCrashed("Chromium does not answer")
        except TimeoutError:
            raise BrowserTimeout(f"no browser answered within {seconds} s") from None

    def gauges(self) -> dict[str, float]:
        """Current counts; memory, drivers included, as of the latest health check."""
        browsers = self._browsers.browsers
        return {
            "sessions_in_use": float(sum(browser.load for browser in browsers) - len(self._cache)),
            "sessions_cached": float(len(self._cache)),
            "sessions_warm": float(sum(browser.ready_count for browser in self._browsers.serving)),
            "browsers": float(len(self._browsers.serving)),
            "browsers_draining": float(len(self._browsers.draining)),
            "resident_mib": sum(browser.chromium.resident_mib for browser in browsers),
        }

    async def _begin(self, task: Task) -> tuple[BrowserInstance, Session, Observation]:
        if cached := self._cache.pop_for(task):
            browser, session = cached
            try:
                observation = await session.reset(task)
            except BaseException as error:
                self._browsers.run_in_background(self._release(browser, session))
                if not isinstance(error, BrowserError):
                    raise
                self.counters.retries += 1
                log.warning("reset of %s failed in a reused page; trying a fresh one: %s", task.id, error)
            else:
                self.counters.sessions_reused += 1
                self._browsers.count_session(browser)
                return browser, session, observation
        for attempt in range(RESET_ATTEMPTS):
            browser, session = await self._acquire()
            try:
                return browser, session, await session.reset(task)
            except BaseException as error:
                self._browsers.run_in_background(self._release(browser, session))
                if attempt == RESET_ATTEMPTS - 1 or not await self._is_browser_fault(browser, error):
                    raise
                self.counters.retries += 1
                log.warning("reset of %s failed; trying another session: %s", task.id, error)
        raise AssertionError("unreachable")

    async def _is_browser_fault(self, browser: BrowserInstance, error: BaseException) -> bool:
        if isinstance(error, BrowserTimeout):
            return not await self._browsers.check(browser)
        crashed = isinstance(error, BrowserError) and not browser.chromium.alive
        return crashed or isinstance(error, BrowserCrashed | PageCrashed)

    async def _prepare(self, chromium: Chromium) -> Session:
        net = await self.egress_proxy.open_port({}, self._isolation.listen() if self._isolation is not None else None)
        try:
            return await Session.prepare(
                chromium.browser, self._settings, self._sites, self._declared, self._step_seconds, net
            )
        except BaseException:
            await net.close()
            raise

    async def _acquire(self) -> tuple[BrowserInstance, Session]:
        last_error: BrowserError | None = None
        for _ in range(ACQUIRE_ATTEMPTS):
            browser = await self._browsers.least_loaded()
            try:
                session = await browser.acquire()
            except BrowserError as error:
                last_error = error
                self.counters.retries += 1
                log.warning("%s; trying again", error)
                await self._browsers.replace_stuck(browser, str(error))
                continue
            finally:
                self._browsers.close_if_drained(browser)
            session.lost.add_done_callback(partial(self._on_lost, browser, session))
            self._browsers.count_session(browser)
            return browser, session
        raise BrowserCrashed(f"no session in {ACQUIRE_ATTEMPTS} attempts; last error: {last_error}") from last_error

    def _end(self, browser: BrowserInstance, session: Session) -> None:
        """Cache or close the session of a finished episode."""
        if self._settings.reuse_pages and self._browsers.is_staying(browser) and session.reusable:
            for evicted in self._cache.put(browser, session):
                self._browsers.run_in_background(self._release(*evicted))
        else:
            self._browsers.run_in_background(self._release(browser, session))

    async def _release(self, browser: BrowserInstance, session: Session) -> None:
        if not await browser.release(session):  # its renderers end only with the browser
            await self._browsers.replace_stuck(browser, "a context did not close")
        if session.recording_saved is not None:
            self.counters.recordings += session.recording_saved
            self.counters.failed_recordings += not session.recording_saved
        self._browsers.close_if_drained(browser)

    def _release_cached(self, browser: BrowserInstance) -> None:
        for _, session in self._cache.evict_browser(browser):
            browser.sessions.discard(session)  # not in use: no episode is lost with it
            self._browsers.run_in_background(self._release(browser, session))

    def _on_lost(self, browser: BrowserInstance, session: Session, lost: asyncio.Future[BrowserError]) -> None:
        if session not in browser.sessions:
            return  # already released
        if self._cache.discard(session):
            self._browsers.run_in_background(self._release(browser, session))
            return
        self.counters.sessions_lost += 1
        if isinstance(lost.result(), BrowserTimeout):
            self._browsers.run_in_background(self._browsers.check(browser))
