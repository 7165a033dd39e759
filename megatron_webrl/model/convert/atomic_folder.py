"""Write a folder whole or not at all, in a background thread."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from megatron_webrl.util import atomic_file


class TargetFolderError(ValueError):
    """A target folder cannot be written. The message names it."""


@contextmanager
def atomic_folder(target: Path, source: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder next to `target`; rename it to `target` on success, remove it on an exception.

    That of a killed process is removed first. Raises TargetFolderError if the target contains `source`, or if it exists
    and is not an empty folder, unless `overwrite` is set.
    """
    target, source = target.resolve(), source.resolve()  # a link is kept, the folder behind it replaced
    if source.is_relative_to(target):
        raise TargetFolderError(f"{target} holds the input {source}; choose another folder")
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        raise TargetFolderError(
            f"{target} is not an empty folder; choose another one or pass --overwrite to replace it"
        )
    temporary, old = (target.parent / f".{target.name}.{state}" for state in ("writing", "replaced"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        atomic_file.fsync_tree(temporary)
        if occupied:
            target.rename(old)
        temporary.rename(target)
        atomic_file.fsync(target.parent)
        if occupied:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free_space(folder: Path, size: int) -> None:
    """Raise TargetFolderError unless the folder's file system has `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetFolderError(
            f"{folder} has {free / 1e9:.2f} GB left, but {size / 1e9:.2f} GB are needed; free some or write elsewhere"
        )


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
