"""How long the sites take to answer, to imitate the web: a median and a heavy tail."""

from __future__ import annotations

import math
import random

from megatron_webrl.config.tasks import LatencyConfig


def response_delay(settings: LatencyConfig, site: str, episode: str, request: int) -> float:
    """Seconds until request number `request` of an episode is answered: log-normal, and always the same."""
    median = settings.site_median_seconds.get(site, settings.median_seconds)
    if not median:
        return 0.0
    normal = random.Random(f"latency/{episode}/{request}").gauss(0.0, 1.0)
    # Bounded before exp: a huge sigma must not overflow.
    bounded = min(math.log(median) + settings.sigma * normal, math.log(settings.max_seconds))
    return min(math.exp(bounded), settings.max_seconds)
