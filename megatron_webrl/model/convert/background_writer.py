"""Write files in a thread, so that the next tensor is assembled while the previous one is written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

WRITE_CHUNK_BYTES = 1 << 20


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Run calls in order in one thread. The next `submit`, `wait` or block end raises the error of a failed call."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="background-writer")
        self._running: Future[object] | None = None

    def submit(self, call: Callable[..., object], *arguments: object) -> None:
        """Wait for the previous call, then start this one. Its arguments must not change until the next `submit`."""
        self.wait()
        self._running = self._executor.submit(call, *arguments)

    def wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._executor.shutdown(wait=True)
        if kind is None:
            self.wait()


def create_file(path: Path) -> BinaryIO:
    """Create a file for buffered writing. Raises FileExistsError if it exists."""
    return io.BufferedWriter(_ChunkedFile(path, "xb"), buffer_size=WRITE_CHUNK_BYTES)


def sync_and_close(file: BinaryIO) -> None:
    """Flush a file to disk and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


class _ChunkedFile(io.FileIO):
    """Write at most WRITE_CHUNK_BYTES per call: large writes from mapped memory take twice the time on Linux."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:WRITE_CHUNK_BYTES])
