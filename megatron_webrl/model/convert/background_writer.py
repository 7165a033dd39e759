"""Files written in a thread, so that a tensor is put together while the one before it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

WRITE_CHUNK_BYTES = 1 << 20  # bytes


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Runs calls in order in one thread, at most one of them ahead of the caller.

    What a call failed with is raised by the next `run`, by `wait`, or at the end of the block.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="background-writer")
        self._running: Future[object] | None = None

    def submit(self, call: Callable[..., object], *arguments: object) -> None:
        """Wait for the call before and start this one. What it works on must stay as it is until the next `run`."""
        self.wait()
        self._running = self._executor.submit(call, *arguments)

    def wait(self) -> None:
        """Wait until nothing is running."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._executor.shutdown(wait=True)
        if kind is None:
            self.wait()


def create_file(path: Path) -> BinaryIO:
    """A file that does not exist, for writing tensors and what lies between them."""
    return io.BufferedWriter(_Pieces(path, "xb"), buffer_size=WRITE_CHUNK_BYTES)


def sync_and_close(file: BinaryIO) -> None:
    """Close a file whose contents are on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


class _Pieces(io.FileIO):
    """Takes one piece at a time: Linux needs twice the time to write large ones from mapped memory."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:WRITE_CHUNK_BYTES])
