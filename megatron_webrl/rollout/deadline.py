"""The time limit of one try at an episode; it can also be ended at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Deadline:
    """Ends an episode within `scope` at its time limit, or upon `expire` at any time; `outcome` names the reason."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds, self.outcome = timeout_seconds, "episode_timeout"  # from when it has a browser
        self._expired = False
        self._scope: asyncio.Timeout | None = None

    def expire(self, outcome: str) -> None:
        """End the current scope and all later ones; `outcome` masks the episode."""
        self._expired, self.outcome = True, outcome
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def scope(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Raise TimeoutError after `seconds` (None: no limit), or once the deadline is expired.

        `expired()` of the yielded timeout distinguishes this TimeoutError from one raised inside the scope.
        """
        scope = asyncio.timeout(0 if self._expired else seconds)
        async with scope:
            self._scope = scope
            try:
                yield scope
            finally:
                self._scope = None
