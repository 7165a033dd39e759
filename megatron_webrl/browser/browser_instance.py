"""One Chromium of a fleet with the sessions on it: some prepared ahead, some in use."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from megatron_webrl.browser.chromium_process import Chromium
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError
from megatron_webrl.browser.session import Session

log = logging.getLogger(__name__)


class BrowserInstance:
    """Life: sessions are taken and released; once it is `leaving`, nothing is prepared any more; close."""

    def __init__(self, chromium: Chromium, warm: int, prepare: Callable[[Chromium], Awaitable[Session]]) -> None:
        """`prepare` makes a session on the Chromium; `warm` of them are kept ready."""
        self.chromium = chromium
        self.episodes_served = 0  # episodes so far
        self.load = 0  # sessions in use, those that are still being prepared for somebody included
        self.sessions: set[Session] = set()  # in use
        self.replacement_started = False  # a successor is on its way, or there
        self.failed = False
        self._leaving = False
        self._checking: asyncio.Task[bool] | None = None
        self._warm: deque[asyncio.Task[Session]] = deque()
        self._warm_count, self._prepare = warm, prepare

    @property
    def ready_count(self) -> int:
        """Sessions that could be taken without waiting."""
        return sum(task.done() and not _spoilt(task) for task in self._warm)

    def refill(self) -> None:
        """Prepare as many sessions as are missing."""
        while len(self._warm) < self._warm_count and not self._leaving:
            self._warm.append(self._begin())

    async def acquire(self) -> Session:
        """A session, in use from here on. Raises BrowserError if none can be prepared."""
        self.load += 1
        preparing = None
        try:
            await self.discard_failed()
            preparing = self._warm.popleft() if self._warm else self._begin()
            self.refill()
            session = await asyncio.shield(preparing)
        except BaseException:
            self.load -= 1
            if preparing is not None and not _spoilt(preparing):
                self._warm.appendleft(preparing)  # who waited for it was cancelled, and the next one gets it
            raise
        self.sessions.add(session)
        return session

    async def release(self, session: Session) -> bool:
        """Close a session in use; whether that worked."""
        self.sessions.discard(session)
        try:
            return await session.close()
        finally:
            self.load -= 1

    def drain(self) -> None:
        """Prepare nothing any more."""
        self._leaving = True

    def fail(self, reason: str) -> None:
        """The browser is of no more use, and neither are its sessions."""
        self._leaving = self.failed = True
        for session in self.sessions:
            session.mark_lost(BrowserCrashed(reason))

    async def close(self) -> None:
        """End the browser with everything on it, gently unless it has failed."""
        self._leaving = True
        stale, self._warm = list(self._warm), deque()
        for task in stale:
            task.cancel()
        for ended in await asyncio.gather(*stale, return_exceptions=True):
            if isinstance(ended, Session):  # its context goes with the browser
                await ended.network.close()
        await self.chromium.close(graceful=not self.failed)

    async def discard_failed(self) -> None:
        """Let go of sessions that were lost before anybody had them."""
        spoilt = [task for task in self._warm if _spoilt(task)]
        for task in spoilt:
            self._warm.remove(task)
        for ended in await asyncio.gather(*spoilt, return_exceptions=True):
            if isinstance(ended, Session):
                await ended.close()
            elif isinstance(ended, BrowserError):
                log.warning("a session could not be prepared: %s", ended)

    async def is_responsive(self) -> bool:
        """Whether the browser answers; who asks meanwhile gets the same answer."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self.chromium.is_responsive())
        return await asyncio.shield(self._checking)

    def _begin(self) -> asyncio.Task[Session]:
        return asyncio.ensure_future(self._prepare(self.chromium))


def _spoilt(task: asyncio.Task[Session]) -> bool:
    """Whether there will be no session, or only one that was lost before anybody had it."""
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().lost.done()
