"""Processes of browsers, for tests that kill them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil


def browser_pids(kind: str, parent_pid: int | None = None) -> list[int]:
    """Processes below `of`, this one by default: "driver", "browser" (without the script before it) or "renderer"."""
    found = []
    for child in psutil.Process(parent_pid or os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if _kind(child.cmdline()) == kind:
                found.append(child.pid)
    return found


def alive_pids(pids: Iterable[int]) -> list[int]:
    """Those that run."""
    running = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                running.append(pid)
    return running


def _kind(words: list[str]) -> str:
    if "run-driver" in words:
        return "driver"
    if not words or "chrom" not in words[0]:
        return ""
    types = [word.removeprefix("--type=") for word in words if word.startswith("--type=")]
    return types[0] if types else "browser" if "--remote-debugging-pipe" in words else ""
