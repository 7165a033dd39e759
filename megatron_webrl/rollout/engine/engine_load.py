"""How busy a worker's engine was, as running sums that whoever reads them takes differences of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimeWeightedGauge:
    """A count that rises and falls, with its integral over time."""

    def __init__(self) -> None:
        self.count = 0
        self._area = self._busy = 0.0
        self._since = time.monotonic()

    @contextmanager
    def track(self) -> Iterator[None]:
        """One more while it lasts."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def integrals(self) -> tuple[float, float]:
        """Integral of the count, and how long it was above zero; seconds."""
        self._add(0)
        return self._area, self._busy

    def _add(self, change: int) -> None:
        now = time.monotonic()
        passed, self._since = now - self._since, now
        self._area += passed * self.count
        self._busy += passed * (self.count > 0)
        self.count += change


class EngineLoad:
    """Requests in an engine and episodes under way. An episode without a request is with its browser, or waits."""

    def __init__(self) -> None:
        self.requests, self.episodes = TimeWeightedGauge(), TimeWeightedGauge()
        self._began = time.monotonic()

    def totals(self) -> dict[str, float]:
        """Seconds since the beginning, those with a request in the engine, and request- and episode-seconds."""
        requests, busy = self.requests.integrals()
        episodes, _ = self.episodes.integrals()
        return {"seconds": time.monotonic() - self._began, "busy": busy, "requests": requests, "episodes": episodes}
