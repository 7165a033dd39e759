"""The clock of the control service's machine, as another machine knows it: NTP's estimate from the exchanges of a role.

Times are of CLOCK_MONOTONIC, which all processes of a machine share. A request is sent at t0, arrives at t1, is
answered at t2, and the answer arrives at t3. The service's clock is ahead by ((t1 - t0) + (t2 - t3)) / 2, and however
unequal both ways are, the error is at most half of the round trip, (t3 - t0) - (t2 - t1). The exchange with the
shortest round trip counts.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXCHANGES = 60  # the last ones, of which the best counts: about a minute


@dataclass(frozen=True)
class ClockOffset:
    """One estimate."""

    clock: str  # identity of the service's clock
    at: float  # this machine's clock, seconds
    offset: float  # the service's clock less this machine's, seconds
    error: float  # bound, seconds


@functools.cache
def clock_identity() -> str:
    """Identity of this process's CLOCK_MONOTONIC: of the machine since it was started, and of the time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/time")
    return f"{boot} {os.readlink(namespace) if namespace.is_symlink() else ''}".strip()


class ServiceClock:
    """Estimates the service's clock from timed exchanges."""

    def __init__(self) -> None:
        self._offsets: deque[ClockOffset] = deque(maxlen=EXCHANGES)

    def add(self, sent: float, times: Mapping[str, Any] | None, arrived: float) -> None:
        """Take in an exchange; `times`: as `stamp` made them, None from a relay that has no estimate yet."""
        if times is None:
            return
        received, answered = times["received"], times["answered"]
        offset = ((received - sent) + (answered - arrived)) / 2
        round_trip = max(0.0, (arrived - sent) - (answered - received))
        self._offsets.append(ClockOffset(times["clock"], arrived, offset, round_trip / 2 + times["error"]))

    def best(self) -> ClockOffset | None:
        """The estimate with the smallest error among the last exchanges; None before the first one."""
        offsets = list(self._offsets)
        newest = [each for each in offsets if each.clock == offsets[-1].clock]  # the service may be on another machine
        return min(newest, key=lambda each: each.error, default=None)


def stamp(received: float, estimate: ClockOffset | None) -> dict[str, Any] | None:
    """The times of an answer to a request that came at `received`, by the service's clock; None without an estimate."""
    if estimate is None:
        return None
    now = time.monotonic() + estimate.offset
    times = {"received": received + estimate.offset, "answered": now}
    return times | {"clock": estimate.clock, "error": estimate.error}


def own_clock() -> ClockOffset:
    """The estimate of the service itself."""
    return ClockOffset(clock_identity(), 0.0, 0.0, 0.0)
