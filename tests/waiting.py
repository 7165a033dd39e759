"""Wait for a condition, with a limit; start a process that does not outlive its test."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


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
