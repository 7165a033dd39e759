"""How much memory browsers hold."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def by_group() -> dict[int, list[int]]:
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
