"""Find the processes of browsers, for tests that kill them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil


def browser_pids(kind: str, parent_pid: int | None = None) -> list[int]:
    """Descendants of a process (default: this one) by kind: "driver", "browser" (not its start script), "renderer"."""
    found = []
    for child in psutil.Process(parent_pid or os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if _kind(child.cmdline()) == kind:
                found.append(child.pid)
    return found


def alive_pids(pids: Iterable[int]) -> list[int]:
    """The pids of running processes."""
    running = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                running.append(pid)
    return running


def _kind(arguments: list[str]) -> str:
    if "run-driver" in arguments:
        return "driver"
    if not arguments or "chrom" not in arguments[0]:
        return ""
    types = [each.removeprefix("--type=") for each in arguments if each.startswith("--type=")]
    return types[0] if types else "browser" if "--remote-debugging-pipe" in arguments else ""
