"""Private memory of processes: what they have in RAM without shared memory and files. It costs no walk of page tables.

Of a forked child it also counts the pages that the child has in common with its parent.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psutil

MEASURE_SECONDS = 10.0


def private_gib(with_children: bool = False) -> float:
    """Private memory of this process, with all of its descendants if wished; GiB."""
    process = psutil.Process()
    family = [process, *(process.children(recursive=True) if with_children else [])]
    return sum(map(_private_bytes, family)) / 2**30


def _private_bytes(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        memory = process.memory_info()
        return int(memory.rss - memory.shared)
    return 0


class PeakMemory:
    """Private memory of this process and its descendants, now and the most of all measurements."""

    def __init__(self) -> None:
        self.gib = self.peak_gib = 0.0

    def measure(self) -> None:
        """Look at every process of the machine, which takes milliseconds."""
        self.gib = private_gib(with_children=True)
        self.peak_gib = max(self.peak_gib, self.gib)

    async def measure_repeatedly(self) -> None:
        """Measure every MEASURE_SECONDS, in a thread, until it is cancelled."""
        while True:
            await asyncio.to_thread(self.measure)
            await asyncio.sleep(MEASURE_SECONDS)
