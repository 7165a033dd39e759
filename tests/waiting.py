"""Wait for a condition, with a limit; write a program; start or fork a process that does not outlive its test."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_webrl.control.child_process import die_with_parent


def until(condition: Callable[[], object], what: str | Callable[[], str], seconds: float = 60.0) -> None:
    """Wait until the condition holds. Raises AssertionError with `what`, which is called then if it is a function."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(0.02)


async def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait in the event loop until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with its output in a pipe, killed at the end if it still runs. `options`: those of Popen."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def write_program(path: Path, text: str) -> Path:
    """A shell script that stands in for a program."""
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked process, which ends with 0 if it returned; the pid."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent(parent=parent)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def exit_code(pid: int, seconds: float = 60.0) -> int:
    """Wait for a forked process; its exit code, or minus the signal that ended it. One that is late dies with us."""
    deadline = time.monotonic() + seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        assert time.monotonic() < deadline, f"process {pid} did not end within {seconds:g} s"
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])


def run_apart(function: Callable[..., None], *arguments: str) -> None:
    """Run a function of a module in a process of its own, which forks many times faster than one with all imports."""
    code = f"import sys; from {function.__module__} import {function.__name__} as run; run(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120)
    assert done.returncode == 0, done.stderr
