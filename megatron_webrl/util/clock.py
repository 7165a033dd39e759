"""Unix time without steps, and the identity of a machine's clock.

A clock that is set while a process runs changes no order, budget or duration in it.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

_START = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_time() -> float:
    """Seconds since 1970, by the clock at the start of this process and the seconds since."""
    return _START + time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def clock_identity() -> str:
    """Identity of this process's CLOCK_MONOTONIC: of the machine since it was started, and of the time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/time")
    return f"{boot} {os.readlink(namespace) if namespace.is_symlink() else ''}".strip()
