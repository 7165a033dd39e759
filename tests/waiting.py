"""Wait for a condition, with a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


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
