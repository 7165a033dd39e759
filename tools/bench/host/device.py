"""A device that computes nothing, and its image workers, on one clock with the host: for benchmarks of the host.

The clock counts CPU seconds of the host's main thread and predicted seconds of the device. So the other work of a
shared machine changes nothing, and an update of minutes takes as long as its host's work.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MAX_PENDING = 1024  # operations that a CUDA stream holds


class SimulatedDevice:
    """A stream that computes what was launched, in order."""

    def __init__(self) -> None:
        self.finished_at = 0.0  # when all that was launched is computed
        self.busy = 0.0
        self.idle: dict[str, float] = defaultdict(float)  # seconds without work, by what the host did
        self._ahead = -time.thread_time()  # of the clock, over the host's CPU seconds

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.thread_time() + self._ahead

    def advance(self, seconds: float) -> None:
        """Let time pass on the host."""
        self._ahead += max(0.0, seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock: this is not the host's work."""
        begun = time.thread_time()
        yield
        self._ahead -= time.thread_time() - begun

    def launch(self, seconds: float, operations: float, launching: float, part: str) -> None:
        """Launch `operations` that compute for `seconds` in all, each `launching` seconds after the one before."""
        begun = self.now
        self._wait(part, begun)
        computed = max(self.finished_at, begun) + seconds
        self.advance(operations * launching)
        self.idle["launches"] += max(0.0, self.now - computed)
        self.finished_at = max(computed, self.now)
        self.busy += seconds
        self.advance(self.finished_at - min(1.0, MAX_PENDING / operations) * seconds - self.now)

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self.advance(self.finished_at - self.now)

    def end(self, part: str) -> None:
        """Count the time since the last operation was computed."""
        self._wait(part, self.now)
        self.finished_at = max(self.finished_at, self.now)

    def _wait(self, part: str, until: float) -> None:
        self.idle[part] += max(0.0, until - self.finished_at)


class ImageClock:
    """When image workers have cut the images that were scheduled, in their order."""

    def __init__(self, device: SimulatedDevice, workers: int, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self._free = [0.0] * workers
        self.ready: dict[bytes, float] = {}

    def schedule(self, images: Sequence[bytes]) -> None:
        """Give images to the workers."""
        for image in images:
            if image not in self.ready:
                done = max(heapq.heappop(self._free), self.device.now) + self.seconds
                heapq.heappush(self._free, done)
                self.ready[image] = done

    def wait(self, images: Sequence[bytes]) -> float:
        """Let the host wait for images; returns the seconds."""
        late = max((self.ready[image] for image in images), default=0.0) - self.device.now
        self.device.advance(late)
        return max(0.0, late)
