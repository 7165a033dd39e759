"""Simulated response time of the sites: log-normal, with a heavy tail as on the web."""

from __future__ import annotations

import math
import random

from megatron_webrl.config.tasks import LatencyConfig

MAX_DELAY_SECONDS = 30.0


def response_delay(settings: LatencyConfig, episode: str, request: int) -> float:
    """Seconds until request number `request` of an episode is answered; a pure function of its arguments."""
    if not settings.median_seconds:
        return 0.0
    normal = random.Random(f"latency/{episode}/{request}").gauss(0.0, 1.0)
    # Bounded before exp: a huge sigma must not overflow.
    exponent = min(math.log(settings.median_seconds) + settings.sigma * normal, math.log(MAX_DELAY_SECONDS))
    return min(math.exp(exponent), MAX_DELAY_SECONDS)
