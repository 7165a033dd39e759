"""Ends what a test run leaves behind, even one that is killed by SIGKILL.

    python -m tests.guard PID

A process of its own, no descendant of the test run, remembers the descendants of PID, and once PID has ended kills
those that still run. Orphans are found by their owner's mark, too (system/child_process.py).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from megatron_webrl.control import child_process

SNAPSHOT_SECONDS = 1.0
KILL_SECONDS = 20.0


def start() -> None:
    """Let a guard watch this process, and mark its children."""
    os.environ.pop(child_process.OWNER_VARIABLE, None)
    subprocess.run(
        [sys.executable, "-m", "tests.guard", str(os.getpid())], check=True, stdin=subprocess.DEVNULL, timeout=60
    )
    os.environ |= child_process.owner_environment()


def watch(pid: int) -> None:
    """Wait for the end of a process, and kill what is left of its descendants."""
    family: set[psutil.Process] = set()
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    while not ended.poll(SNAPSHOT_SECONDS * 1000):
        with suppress(psutil.NoSuchProcess):
            family = {process for process in family if process.is_running()}
            family.update(psutil.Process(pid).children(recursive=True))
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        left = {process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}
        for process in left:
            with suppress(psutil.NoSuchProcess):
                family.update(process.children(recursive=True))
                process.kill()
        if not child_process.sweep_orphans() and not left:
            return
        time.sleep(0.05)


def main() -> None:
    pid = int(sys.argv[1])
    if os.fork():
        return
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)
    watch(pid)


if __name__ == "__main__":
    main()
