"""Where the threads of a role are: their stacks, written into its log when it gets SIGUSR2.

Every `webrl` process and every process of an engine takes the signal; others, such as browsers, are never sent it,
since it would end them.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_webrl.system import child_process

DUMP_SIGNAL = signal.SIGUSR2
KILL_SECONDS = 10.0  # for a killed role to be gone
_STDERR = 2
_QUIET_SECONDS, _LIMIT_SECONDS = 0.1, 5.0  # a log that does not grow for so long is complete; limit of a process


def register_dump_signal() -> None:
    """From here on SIGUSR2 writes the stacks of all threads of this process to its standard error."""
    faulthandler.register(DUMP_SIGNAL, _STDERR, all_threads=True)


def dump_stacks(leader: int, log: Path, why: str) -> list[str]:
    """Have a role and its descendants write their stacks into its log; returns what could not, and why not.

    `why` is said in the log before them. Takes 5 s at most for each process.
    """
    missing = []
    for pid in _family(leader):
        name = f"{_name(pid)} ({pid})"
        if child_process.process_state(pid) in ("T", "t"):
            missing.append(f"{name} is stopped and cannot show its stacks")
            _append(log, missing[-1])
        elif _catches(pid):
            _append(log, f"stacks of {name}: {why}")
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
            _await_quiet(log)
        elif pid == leader:
            missing.append(f"{name} does not show its stacks yet: it has only just started")
            _append(log, missing[-1])
    return missing


def _append(log: Path, words: str) -> None:
    with log.open("a") as file:
        file.write(f"-- {words} --\n")


def _family(leader: int) -> list[int]:
    """A process and its descendants, if it runs."""
    with suppress(psutil.NoSuchProcess):
        return [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
    return []


def _catches(pid: int) -> bool:
    """Whether a process has a handler for the signal and is a Python: others use it for ends of their own."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return program.startswith("python") and bool(int(line.split()[1], 16) >> (DUMP_SIGNAL - 1) & 1)
    return False


def _name(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "ended"


def _await_quiet(log: Path) -> None:
    before, deadline, changed = log.stat().st_size, time.monotonic() + _LIMIT_SECONDS, 0.0
    while time.monotonic() < deadline:
        size = log.stat().st_size
        if size != before:
            before, changed = size, time.monotonic()
        elif changed and time.monotonic() - changed > _QUIET_SECONDS:
            return
        time.sleep(0.02)
