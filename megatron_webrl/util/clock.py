"""Unix time without steps: a clock that is set while a process runs changes no order, budget or duration in it."""

from __future__ import annotations

import time

_START = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_time() -> float:
    """Seconds since 1970, by the clock at the start of this process and the seconds since."""
    return _START + time.clock_gettime(time.CLOCK_BOOTTIME)
