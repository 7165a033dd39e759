"""Find the processes of browsers, for tests that kill them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Empty once the process has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def browser_pids(kind: str, parent_pid: int | None = None) -> list[int]:
    """Descendants of a process (default: this one) by kind: "driver", "browser" (not its start script), "renderer"."""
    children = psutil.Process(parent_pid or os.getpid()).children(recursive=True)
    return [child.pid for child in children if _kind(command_line(child)) == kind]


def alive_pids(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if _status(pid) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)]


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _kind(arguments: list[str]) -> str:
    if "run-driver" in arguments:
        return "driver"
    if not arguments or "chrom" not in arguments[0]:
        return ""
    types = [each.removeprefix("--type=") for each in arguments if each.startswith("--type=")]
    return types[0] if types else "browser" if "--remote-debugging-pipe" in arguments else ""
