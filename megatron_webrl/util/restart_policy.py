"""How often a process that keeps failing is restarted, and after what delay. Pure: the caller passes the time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

HOUR = 3600.0  # seconds
FIRST_DELAY_SECONDS = 1.0  # before the second restart; doubles with each further one
MAX_DELAY_SECONDS = 60.0
JITTER = 0.5  # largest share of a delay that chance takes off, so that processes that fail together restart apart


def restart_delay(number: int, chance: float) -> float:
    """Seconds before restart `number` of a series, from 1: the first is immediate. `chance`: from [0, 1]."""
    if number <= 1:
        return 0.0
    return min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(number - 2, 16)) * (1 - JITTER * chance)


@dataclass
class RestartPolicy:
    """Budget of one process: at most `max_restarts` within any `window_seconds`.

    A failure is recorded by `next_restart`, which grants a restart or returns None once the budget is spent. Restarts
    older than the window are forgotten, and with them the delay that they added.
    """

    max_restarts: int
    window_seconds: float = HOUR
    _granted: deque[tuple[float, str]] = field(default_factory=deque)  # time of the failure, reason

    def next_restart(self, now: float, reason: str) -> float | None:
        """The time of the restart after a failure at `now` (monotonic seconds); None if the budget is spent."""
        while self._granted and now - self._granted[0][0] >= self.window_seconds:
            self._granted.popleft()
        if len(self._granted) >= self.max_restarts:
            return None
        self._granted.append((now, reason))
        return now + restart_delay(len(self._granted), random.random())

    @property
    def used(self) -> int:
        """Restarts granted within the window that ended with the last failure."""
        return len(self._granted)

    @property
    def reasons(self) -> list[str]:
        """Reason of each of those, oldest first."""
        return [reason for _, reason in self._granted]
