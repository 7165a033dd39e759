"""The load of a worker's engine, as running totals; a reader takes differences of two reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimeWeightedGauge:
    """A count and its integral over time."""

    def __init__(self) -> None:
        self.count = 0
        self._area = self._busy = 0.0
        self._since = time.monotonic()

    @contextmanager
    def track(self) -> Iterator[None]:
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def integrals(self) -> tuple[float, float]:
        """The integral of the count, and the time during which it was positive; seconds."""
        self._add(0)
        return self._area, self._busy

    def _add(self, change: int) -> None:
        now = time.monotonic()
        passed, self._since = now - self._since, now
        self._area += passed * self.count
        self._busy += passed * (self.count > 0)
        self.count += change


class EngineLoad:
    """Requests in an engine, and running episodes. An episode without a request uses its browser, or waits."""

    def __init__(self) -> None:
        self.requests, self.episodes = TimeWeightedGauge(), TimeWeightedGauge()
        self._started = time.monotonic()

    def totals(self) -> dict[str, float]:
        """Seconds since the start, seconds with a request in the engine, request-seconds and episode-seconds."""
        requests, busy = self.requests.integrals()
        episodes, _ = self.episodes.integrals()
        return {"seconds": time.monotonic() - self._started, "busy": busy, "requests": requests, "episodes": episodes}
