"""Stack dumps: on SIGUSR2 a role writes the stacks of all its threads into its log.

Every `webrl` process and engine process handles the signal. Others, such as browsers, never get it: it would end them.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_webrl.util import child_process

DUMP_SIGNAL = signal.SIGUSR2
_STDERR = 2
_QUIET_SECONDS = 0.1  # a dump is complete when the log has not grown for this time
_LIMIT_SECONDS = 5.0  # for the dump of one process


def register_dump_signal() -> None:
    """Let SIGUSR2 write the stacks of all threads of this process to its standard error."""
    faulthandler.register(DUMP_SIGNAL, _STDERR, all_threads=True)


def dump_stacks(leader: int, log: Path, why: str) -> list[str]:
    """Log `why` and the stacks of a role and its descendants, in 5 s each; return a message for each that failed."""
    missing = []
    for process in child_process.family(leader):
        name, problem = child_process.process_name(process.pid), ""
        with suppress(psutil.NoSuchProcess, OSError):  # it has ended
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                problem = f"{name} is stopped and cannot show its stacks"
            elif _handles_dump_signal(process.pid):
                _append(log, f"stacks of {name}: {why}")
                process.send_signal(DUMP_SIGNAL)
                _wait_until_complete(log)
            elif process.pid == leader:
                problem = f"{name} does not show its stacks yet: it has only just started"
        if problem:
            missing.append(problem)
            _append(log, problem)
    return missing


def _append(log: Path, message: str) -> None:
    with suppress(OSError), log.open("a") as file:  # a disk that fails is no reason not to kill
        file.write(f"-- {message} --\n")


def _handles_dump_signal(pid: int) -> bool:
    """Whether a process is a Python with a handler for the signal; other programs use it otherwise."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return program.startswith("python") and bool(int(line.split()[1], 16) >> (DUMP_SIGNAL - 1) & 1)
    return False


def _wait_until_complete(log: Path) -> None:
    before, deadline, changed = log.stat().st_size, time.monotonic() + _LIMIT_SECONDS, 0.0
    while time.monotonic() < deadline:
        size = log.stat().st_size
        if size != before:
            before, changed = size, time.monotonic()
        elif changed and time.monotonic() - changed > _QUIET_SECONDS:
            return
        time.sleep(0.02)
