"""How much memory browsers hold, and a limit to what pages take."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")


def pids_by_process_group() -> dict[int, list[int]]:
    """The processes of each process group."""
    found: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(ProcessLookupError, PermissionError):
                found[os.getpgid(int(entry))].append(int(entry))
    return found


def resident_mib(pids: Iterable[int]) -> float:
    """Proportional set size of processes together: memory that n processes share counts as an n-th for each.

    Of a process that may not be looked into (a renderer in Chromium's sandbox), what it shares with nobody.
    """
    return sum(_proportional(pid) for pid in pids) / 2**20


def _proportional(pid: int) -> int:
    """Bytes; 0 for a process that has gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
        except PermissionError:
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            return (int(resident) - int(shared)) * _PAGE
    return 0


def limit_page_memory(browser: int, mib: int) -> int:
    """Let each process that Chromium starts for pages take `mib` MiB at most; returns how many zygotes were told.

    `browser`: id of Chromium's browser process. Renderers are forked from zygotes, whose limits they inherit. Counted
    is writable memory of the process's own (RLIMIT_DATA): address space that is merely set aside, of which V8 takes a
    terabyte, and memory that is shared with other processes do not count.
    """
    told = 0
    for child in psutil.Process(browser).children(recursive=True):
        try:
            if "--type=zygote" in child.cmdline():
                child.rlimit(psutil.RLIMIT_DATA, (mib << 20, mib << 20))
                told += 1
        except psutil.NoSuchProcess:
            continue  # a helper that has done its work
        except psutil.AccessDenied:
            log.warning("the memory of pages is not limited: process %d may not be told so", child.pid)
    return told
