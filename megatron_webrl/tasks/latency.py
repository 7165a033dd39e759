"""Simulated response time of local pages: log-normal, with a heavy tail as on the web."""

from __future__ import annotations

import math
import random

from megatron_webrl.config.tasks import LatencyConfig

MAX_DELAY_SECONDS = 30.0
MAX_COUNTED_TASKS = 4096


def response_delay(settings: LatencyConfig, episode: str, request: int) -> float:
    """Seconds until request number `request` of an episode is answered; a pure function of its arguments."""
    if not settings.median_seconds:
        return 0.0
    normal = random.Random(f"latency/{episode}/{request}").gauss(0.0, 1.0)
    # Bounded before exp: a huge sigma must not overflow.
    exponent = min(math.log(settings.median_seconds) + settings.sigma * normal, math.log(MAX_DELAY_SECONDS))
    return min(math.exp(exponent), MAX_DELAY_SECONDS)


class ResponseDelays:
    """The delays of an episode's responses, one after another. Not thread-safe."""

    def __init__(self, settings: LatencyConfig, episode: str) -> None:
        """The delays are a function of the name of the episode."""
        self.episode = episode
        self._settings, self._requests = settings, 0

    def next(self) -> float:
        """Seconds until the next request is answered."""
        self._requests += 1
        return response_delay(self._settings, self.episode, self._requests - 1)


class EpisodeDelays:
    """Delays of a source's episodes: episodes of one task differ, by their number. Not thread-safe."""

    def __init__(self, settings: LatencyConfig) -> None:
        self._settings = settings
        self._counts: dict[str, int] = {}  # of episodes, by task; the one that was started longest ago comes first

    def start(self, task: str) -> ResponseDelays:
        """The delays of the next episode of a task."""
        number = self._counts.pop(task, 0)
        self._counts[task] = number + 1
        if len(self._counts) > MAX_COUNTED_TASKS:
            del self._counts[next(iter(self._counts))]
        return ResponseDelays(self._settings, f"{task}/{number}")
