"""The time limit of one try at an episode, which whoever holds it may bring forward to now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Deadline:
    """Ends an episode in its time, or at once; `outcome` names which.

    Life: the try enters `scope` whenever it waits for something; `end` may come before, within, between or after.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long the episode may take once it has a browser."""
        self.timeout_seconds, self.outcome = seconds, "episode_timeout"
        self._ended = False
        self._scope: asyncio.Timeout | None = None

    def expire(self, outcome: str) -> None:
        """End what is in `scope` now, and whatever enters it later; `outcome` is what masks the episode."""
        self._ended, self.outcome = True, outcome
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def scope(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Raises TimeoutError after `seconds`, None for no limit of its own, or once the episode is ended.

        What it yields tells by `expired()` such a TimeoutError from one that comes from within.
        """
        scope = asyncio.timeout(0 if self._ended else seconds)
        async with scope:
            self._scope = scope
            try:
                yield scope
            finally:
                self._scope = None
