"""Keeps the browsers of a pool running: launch, health check, replacement, draining."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from megatron_webrl.browser.browser_instance import BrowserInstance
from megatron_webrl.browser.chromium_process import Chromium
from megatron_webrl.browser.errors import BrowserCrashed
from megatron_webrl.browser.isolation import Isolation
from megatron_webrl.browser.pool_counters import BrowserPoolCounters
from megatron_webrl.browser.process_memory import pids_by_process_group
from megatron_webrl.browser.session import Session
from megatron_webrl.util.supervised_process import RestartPolicy

log = logging.getLogger(__name__)

LAUNCH_RETRIES = 2  # of one launch; a browser that ran and ended is replaced without a limit
HEALTH_CHECK_SECONDS = 10.0  # between two checks of all browsers
RECYCLE_EPISODES = 2000  # a browser that has served this many is replaced
RECYCLE_MIB = 6144  # a browser grown by more since its launch, driver and open sessions included, is replaced
PAGE_MIB = 2048  # memory limit of a renderer process: the page crashes beyond it


class BrowserSupervisor:
    """Keeps `count` browsers running.

    A browser that crashes or hangs loses its sessions and is replaced at once. One that is old, has grown or cannot
    close a context serves until its successor runs, then drains, and ends with its last session.
    """

    def __init__(
        self, executable: str, arguments: Callable[[int], list[str]], count: int, warm_each: int,
        prepare: Callable[[Chromium], Awaitable[Session]], release_cached: Callable[[BrowserInstance], None],
        counters: BrowserPoolCounters, isolation: Isolation | None,
    ) -> None:  # fmt: skip
        """`arguments`: launch arguments, by a local port where nothing listens. `prepare` opens a session, `warm_each`
        are kept ready on each browser; `release_cached` releases the idle sessions of a browser that is about to end.
        """
        self.serving: list[BrowserInstance] = []
        self.draining: set[BrowserInstance] = set()  # each ends with its last session
        self._executable, self._arguments, self._count, self._warm_each = executable, arguments, count, warm_each
        self._prepare, self._release_cached, self._counters = prepare, release_cached, counters
        self._isolation = isolation
        self._launching: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._watch_task: asyncio.Task[None] | None = None
        self._closing = False
        self._closed_port: socket.socket | None = None

    @property
    def browsers(self) -> list[BrowserInstance]:
        """Serving and draining browsers."""
        return [*self.serving, *self.draining]

    async def start(self) -> None:
        """Launch the browsers and start the health checks. Raises BrowserCrashed."""
        # Bound but not listening: connections to this local port are refused, and no other process can listen on it.
        self._closed_port = socket.socket()
        self._closed_port.bind(("127.0.0.1", 0))
        self._launch_missing()
        await asyncio.gather(*self._launching)
        self._watch_task = asyncio.get_running_loop().create_task(self._watch(), name="health check")
        self._watch_task.add_done_callback(_log_failure)

    async def close(self) -> None:
        """End all browsers; each wait has a limit."""
        self._closing = True
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        for browser in self.browsers:
            self._release_cached(browser)
        # Not cancelled: every task has its own limits, and a driver stopped half-way cannot be stopped again.
        while unfinished := [*self._launching, *self._background]:
            await asyncio.gather(*unfinished, return_exceptions=True)
        browsers, self.serving, self.draining = self.browsers, [], set()
        await asyncio.gather(*(browser.close() for browser in browsers))
        if self._closed_port is not None:
            self._closed_port.close()

    async def least_loaded(self) -> BrowserInstance:
        """The browser with the fewest sessions; waits for a launch if none is serving. Raises BrowserCrashed."""
        while not self.serving:
            self._launch_missing()
            launching = set(self._launching)
            if not launching:
                raise BrowserCrashed("the browser pool is not open")
            await asyncio.wait(launching, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in launching if task.done()]
            if not self.serving and failures and failures[0] is not None:
                raise failures[0]
        return min(self.serving, key=lambda browser: (browser.load, -browser.ready_count))

    def is_staying(self, browser: BrowserInstance) -> bool:
        """Whether a browser serves and is not about to be replaced."""
        return browser in self.serving and not browser.replacement_started and not self._closing

    def count_session(self, browser: BrowserInstance) -> None:
        """Count a session handed out on a browser; after RECYCLE_EPISODES replace the browser."""
        self._counters.sessions += 1
        browser.episodes_served += 1
        old = browser.episodes_served >= RECYCLE_EPISODES and not self._launching
        if old and self._replace(browser, f"it has served {browser.episodes_served} episodes"):
            self._counters.recycled_by_episodes += 1

    async def check(self, browser: BrowserInstance) -> bool:
        """Whether a browser answers; one that does not is killed and replaced."""
        if browser.failed:
            return False
        responsive = await browser.is_responsive()
        if not responsive and not browser.failed and browser in self.browsers:
            if browser.chromium.alive:
                self._counters.hangs += 1
                self._fail(browser, "Chromium does not answer")
            else:
                self._on_exit(browser, "Chromium or its driver has ended")
        return responsive

    async def replace_stuck(self, browser: BrowserInstance, reason: str) -> None:
        """Replace a browser that answers but did not open or close a context."""
        if await self.check(browser) and self._replace(browser, reason):
            self._counters.recycled_by_stuck_contexts += 1

    def close_if_drained(self, browser: BrowserInstance) -> None:
        """Close a draining browser that has failed or has no session left."""
        if browser in self.draining and (browser.failed or not browser.load):
            self.draining.discard(browser)
            self.run_in_background(browser.close())

    def run_in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine that `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Launch

    def _launch_missing(self) -> None:
        while len(self.serving) + len(self._launching) < self._count and not self._closing:
            self._start_launch(None)

    def _start_launch(self, predecessor: BrowserInstance | None) -> None:
        task = asyncio.get_running_loop().create_task(self._launch(predecessor), name="browser launch")
        self._launching.add(task)

        def on_launched(task: asyncio.Task[None]) -> None:
            self._launching.discard(task)
            if task.exception() is None:
                self._launch_missing()  # other browsers may have ended in the meantime
            elif predecessor is not None:
                predecessor.replacement_started = False  # it keeps serving

        task.add_done_callback(on_launched)
        task.add_done_callback(_log_failure)

    async def _launch(self, predecessor: BrowserInstance | None) -> None:
        """Launch a browser, then drain its predecessor. Raises BrowserCrashed."""
        assert self._closed_port is not None, "start() must come before session()"
        arguments = self._arguments(self._closed_port.getsockname()[1])
        chromium, retries = None, RestartPolicy(LAUNCH_RETRIES)
        while chromium is None:
            try:
                self._counters.launches += 1
                chromium = await Chromium.launch(self._executable, arguments, PAGE_MIB, self._isolation)
            except BrowserCrashed as error:
                self._counters.failed_launches += 1
                if (retry_at := retries.next_restart(time.monotonic(), str(error))) is None:
                    raise
                await asyncio.sleep(retry_at - time.monotonic())
        browser = BrowserInstance(chromium, self._warm_each, self._prepare)
        self.serving.append(browser)
        chromium.on_exit(partial(self._on_exit, browser))
        browser.refill()
        if predecessor is not None:
            self._drain(predecessor)

    # Replacement

    def _replace(self, browser: BrowserInstance, reason: str) -> bool:
        """Launch a successor of a working browser; False if a replacement has already started."""
        if not self.is_staying(browser):
            return False
        log.info("replacing a browser: %s", reason)
        browser.replacement_started = True
        self._start_launch(browser)
        return True

    def _on_exit(self, browser: BrowserInstance, reason: str) -> None:
        """Handle the end of a browser or its driver, expected or not."""
        if browser in self.browsers:
            self._counters.crashes += 1
            self._fail(browser, reason)

    def _fail(self, browser: BrowserInstance, reason: str) -> None:
        self._release_cached(browser)
        log.warning("%s; %d sessions are lost", reason, len(browser.sessions))
        browser.fail(reason)
        self._drain(browser)
        self._launch_missing()

    def _drain(self, browser: BrowserInstance) -> None:
        """Give a browser no more sessions; it ends with its last session, or at once if it has failed."""
        browser.drain()
        self._release_cached(browser)
        if browser in self.serving:
            self.serving.remove(browser)
            self.draining.add(browser)
        self.close_if_drained(browser)

    # Health check

    async def _watch(self) -> None:
        """Check, measure and replace browsers until the pool closes."""
        while True:
            await asyncio.sleep(HEALTH_CHECK_SECONDS)
            browsers = self.browsers
            await asyncio.gather(*(self.check(browser) for browser in browsers))
            await asyncio.to_thread(_measure_memory, [browser.chromium for browser in browsers])
            self._replace_largest()
            self._launch_missing()
            for browser in list(self.serving):
                await browser.discard_failed()
                browser.refill()

    def _replace_largest(self) -> None:
        """Replace the browser that has grown most if it exceeds RECYCLE_MIB; one at a time."""
        if not self.serving or self._launching or len(self.draining) >= self._count:
            return
        browser = max(self.serving, key=lambda browser: browser.chromium.growth_mib)
        growth = browser.chromium.growth_mib
        if growth > RECYCLE_MIB and self._replace(browser, f"it has grown by {growth:.0f} MiB"):
            self._counters.recycled_by_memory += 1


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the exception of a task that no caller may be waiting for."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed: %s", task.get_name(), task.exception())


def _measure_memory(browsers: list[Chromium]) -> None:
    groups = pids_by_process_group()
    for chromium in browsers:
        chromium.measure_memory(groups)
