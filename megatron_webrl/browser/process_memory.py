"""Measure the memory of browsers and limit the memory of pages."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def pids_by_process_group() -> dict[int, list[int]]:
    """Process ids by process group."""
    groups: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(ProcessLookupError, PermissionError):
                groups[os.getpgid(int(entry))].append(int(entry))
    return groups


def resident_mib(pids: Iterable[int]) -> float:
    """Total proportional set size; for a process that must not be inspected (sandboxed renderer) its private memory."""
    return sum(_proportional(pid) for pid in pids) / 2**20


def _proportional(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
        except PermissionError:
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            return (int(resident) - int(shared)) * _PAGE_BYTES
    return 0


def limit_page_memory(browser: int, mib: int) -> int:
    """Limit each renderer process to `mib` MiB; returns the number of zygote processes limited.

    `browser`: id of Chromium's browser process. Renderers are forked from zygotes and inherit their limits. RLIMIT_DATA
    counts private writable memory, not shared memory or reserved address space, of which V8 takes a terabyte.
    """
    limited = 0
    for child in psutil.Process(browser).children(recursive=True):
        try:
            if "--type=zygote" in child.cmdline():
                child.rlimit(psutil.RLIMIT_DATA, (mib << 20, mib << 20))
                limited += 1
        except psutil.NoSuchProcess:
            continue  # a helper process that has ended
        except psutil.AccessDenied:
            log.warning("cannot limit the memory of pages: no permission for process %d", child.pid)
    return limited
