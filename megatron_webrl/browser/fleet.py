"""Browser sessions on demand: warm contexts on one Chromium, each used for one episode, then replaced."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from megatron_webrl.browser.archive import check_archives
from megatron_webrl.browser.chromium import find_chromium, launch_arguments, proxy_settings
from megatron_webrl.browser.errors import BrowserCrashed
from megatron_webrl.browser.gateway import Gateway
from megatron_webrl.browser.policy import Endpoint, declared_endpoints, direct_endpoints
from megatron_webrl.browser.process import Chromium
from megatron_webrl.browser.session import Session
from megatron_webrl.browser.site import Site
from megatron_webrl.config import BrowserConfig

log = logging.getLogger(__name__)

LAUNCH_ATTEMPTS = 3
SESSIONS_PER_WARM = 4  # one context is kept ready for so many sessions
SESSIONS_PER_BROWSER = 2000
"""After so many a new Chromium takes over: driver and browser grow slowly, the driver by 0.1 MiB a session."""


class Fleet:
    """At most `sessions` episodes at a time on one Chromium, which is relaunched when it has crashed or grown old.

    Example: `async with fleet.session() as session: await session.reset(task)`. A session that was in use when the
    browser crashed raises BrowserCrashed; the next one gets a new browser.
    """

    def __init__(
        self, settings: BrowserConfig, sites: Mapping[str, Site], sessions: int, step_seconds: float = 120.0
    ) -> None:
        """`sites` by the name of the task source. Raises BrowserMissing, ConfigError."""
        check_archives(settings)
        self._executable = find_chromium(settings.executable)
        self._settings, self._sites, self._step_seconds = settings, sites, step_seconds
        self._limit = asyncio.Semaphore(sessions)
        self._warm_count = -(-sessions // SESSIONS_PER_WARM)
        self._warm: deque[tuple[Chromium, asyncio.Task[Session]]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._launching = asyncio.Lock()
        self._current: Chromium | None = None
        self._retired: set[Chromium] = set()  # with sessions still in use
        self._closed_port: socket.socket | None = None
        self.gateway = Gateway(settings)
        self._declared: dict[Endpoint, Endpoint] = {}
        for site in sites.values():
            self._declared |= declared_endpoints(site.origins, site.addresses)
        # Past the gateway nothing would hold a replayed page back.
        self._direct = {} if settings.replay else direct_endpoints(self._declared, self.gateway.policy)
        self.launches = 0

    async def start(self) -> None:
        """Launch Chromium and prepare the first contexts. Raises BrowserError."""
        # Bound but not listening: a port of this machine where connections are refused and nobody else can listen.
        self._closed_port = socket.socket()
        self._closed_port.bind(("127.0.0.1", 0))
        self._refill(await self._running())

    async def close(self) -> None:
        """Close everything within a limit; no process is left."""
        await self._drop_warm()
        # Left to end by itself: each part of it has a limit, and a driver stopped half-way cannot be stopped again.
        await asyncio.gather(*self._background, return_exceptions=True)
        everyone = [*self._retired, *([self._current] if self._current else [])]
        self._retired, self._current = set(), None
        await asyncio.gather(*(chromium.close() for chromium in everyone))
        self.gateway.close()
        if self._closed_port is not None:
            self._closed_port.close()

    async def __aenter__(self) -> Fleet:
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
            chromium, session = await self._take()
            try:
                yield session
            finally:
                # Closing takes a while and nobody needs to wait for it.
                self._do(self._release(chromium, session))

    async def _take(self) -> tuple[Chromium, Session]:
        for _ in range(LAUNCH_ATTEMPTS):
            chromium = await self._running()
            self._refill(chromium)
            _, preparing = self._warm.popleft()
            chromium.sessions += 1
            chromium.in_use += 1
            self._refill(chromium)
            try:
                return chromium, await preparing
            except BrowserCrashed as error:
                chromium.in_use -= 1
                log.warning("%s; trying again", error)
            except BaseException:
                chromium.in_use -= 1
                preparing.cancel()
                raise
        raise BrowserCrashed(f"Chromium ended {LAUNCH_ATTEMPTS} times in a row before a context was ready")

    async def _release(self, chromium: Chromium, session: Session) -> None:
        await session.close()
        chromium.in_use -= 1
        if chromium in self._retired and not chromium.in_use:
            await self._end(chromium)

    def _refill(self, chromium: Chromium) -> None:
        while len(self._warm) < self._warm_count:
            self._warm.append((chromium, asyncio.get_running_loop().create_task(self._prepare(chromium))))

    async def _prepare(self, chromium: Chromium) -> Session:
        access = await self.gateway.admit(self._declared)
        try:
            proxy = proxy_settings(access.port, self._direct)
            return await Session.prepare(
                chromium.browser, self._settings, self._sites, self._step_seconds, access, proxy
            )
        except BaseException:
            await access.close()
            raise

    async def _running(self) -> Chromium:
        """The Chromium for the next session; `_warm` holds contexts of no other."""
        async with self._launching:
            if self._current is not None and not self._current.alive:
                log.warning("Chromium has ended; launching it again")
                await self._retire(self._current)
            elif self._current is not None and self._current.sessions >= SESSIONS_PER_BROWSER:
                log.info("Chromium has served %d sessions; launching a new one", self._current.sessions)
                await self._retire(self._current)
            if self._current is None:
                self._current = await self._launch()
            return self._current

    async def _retire(self, chromium: Chromium) -> None:
        self._current = None
        self._retired.add(chromium)
        await self._drop_warm()
        if not chromium.in_use:
            self._do(self._end(chromium))

    async def _drop_warm(self) -> None:
        stale = [task for _, task in self._warm]
        self._warm.clear()
        for task in stale:
            task.cancel()
        # Their contexts go with the browser.
        for ended in await asyncio.gather(*stale, return_exceptions=True):
            if isinstance(ended, Session):
                await ended.access.close()

    async def _end(self, chromium: Chromium) -> None:
        await chromium.close()
        self._retired.discard(chromium)

    async def _launch(self) -> Chromium:
        assert self._closed_port is not None, "start() comes before session()"
        arguments = launch_arguments(self._direct, self._closed_port.getsockname()[1])
        self.launches += 1
        return await Chromium.launch(self._executable, arguments, self._settings.page_mib)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
