"""One Chromium of the pool and its sessions: prepared ahead or in use."""

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
    """Hands out sessions (`acquire`, `release`) until it drains or fails; `close` ends the browser."""

    def __init__(self, chromium: Chromium, warm: int, prepare: Callable[[Chromium], Awaitable[Session]]) -> None:
        """`prepare` opens a session on the Chromium; `warm` sessions are kept ready."""
        self.chromium = chromium
        self.episodes_served = 0
        self.load = 0  # sessions in use, including those a caller is waiting for
        self.sessions: set[Session] = set()  # in use
        self.replacement_started = False  # a successor is being launched or runs
        self.failed = False
        self._draining = False
        self._checking: asyncio.Task[bool] | None = None
        self._warm: deque[asyncio.Task[Session]] = deque()
        self._warm_count, self._prepare = warm, prepare

    @property
    def ready_count(self) -> int:
        """Sessions that can be acquired without waiting."""
        return sum(task.done() and not _has_failed(task) for task in self._warm)

    def refill(self) -> None:
        """Start preparing the missing warm sessions."""
        while len(self._warm) < self._warm_count and not self._draining:
            self._warm.append(self._start_preparing())

    async def acquire(self) -> Session:
        """Take a session into use. Raises BrowserError if none can be prepared."""
        self.load += 1
        preparing = None
        try:
            await self.discard_failed()
            preparing = self._warm.popleft() if self._warm else self._start_preparing()
            self.refill()
            session = await asyncio.shield(preparing)
        except BaseException:
            self.load -= 1
            if preparing is not None and not _has_failed(preparing):
                self._warm.appendleft(preparing)  # the caller was cancelled; the next one gets this session
            raise
        self.sessions.add(session)
        return session

    async def release(self, session: Session) -> bool:
        """Close a session in use; returns whether its context closed."""
        self.sessions.discard(session)
        try:
            return await session.close()
        finally:
            self.load -= 1

    def drain(self) -> None:
        """Stop preparing sessions."""
        self._draining = True

    def fail(self, reason: str) -> None:
        """Mark the browser as failed and its sessions as lost."""
        self._draining = self.failed = True
        for session in self.sessions:
            session.mark_lost(BrowserCrashed(reason))

    async def close(self) -> None:
        """End the browser, gracefully unless it has failed."""
        self._draining = True
        warm, self._warm = list(self._warm), deque()
        for task in warm:
            task.cancel()
        for result in await asyncio.gather(*warm, return_exceptions=True):
            if isinstance(result, Session):  # its context ends with the browser
                await result.network.close()
        await self.chromium.close(graceful=not self.failed)

    async def discard_failed(self) -> None:
        """Remove warm sessions that could not be prepared or were lost before use."""
        failed = [task for task in self._warm if _has_failed(task)]
        for task in failed:
            self._warm.remove(task)
        for result in await asyncio.gather(*failed, return_exceptions=True):
            if isinstance(result, Session):
                await result.close()
            elif isinstance(result, BrowserError):
                log.warning("a session could not be prepared: %s", result)

    async def is_responsive(self) -> bool:
        """Whether the browser answers; concurrent callers share one check."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self.chromium.is_responsive())
        return await asyncio.shield(self._checking)

    def _start_preparing(self) -> asyncio.Task[Session]:
        return asyncio.ensure_future(self._prepare(self.chromium))


def _has_failed(task: asyncio.Task[Session]) -> bool:
    """Whether preparing failed, or the prepared session was lost before use."""
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().lost.done()
