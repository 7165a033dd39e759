"""Histories: files of JSON lines that only grow at their end. Their cost does not depend on their length.

`History` is the one writer of a file; a file of several writers grows by `append_shared`. A line is written by one
call; a process that is killed, or a full disk, can leave half of one at the end: readers leave it out and say so, the
next writer cuts it off. A resumed run cuts off the lines after its checkpoint, at a known size (`History`) or line by
line from the end (`kept_size`). `Tail` reads what is new.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_webrl.util import atomic_file

log = logging.getLogger(__name__)

MAX_UNWRITTEN_BYTES = 2**26  # that wait in memory for a disk that is full or fails
LOCK_TIMEOUT_SECONDS = 2.0
_LOCK_POLL_SECONDS = 0.01
_BLOCK_BYTES = 65536
_KNOWN_LINES = 4096  # of a Tail: how far a file can be cut back without reading it again from its beginning


class History:
    """Appends lines to a file as its only writer.

    Lines that cannot be written are kept in memory, up to MAX_UNWRITTEN_BYTES, and written by a later call.
    """

    def __init__(self, path: Path, size: int | None = None, guard: Callable[[], object] = lambda: None) -> None:
        """Open or create the file, and cut off what follows `size` bytes, or half a line at its end. Raises OSError.

        `guard` is called before the file is changed; it raises if this process may no longer write.
        """
        self.path, self._guard, self._unwritten, self._failing = path, guard, b"", False
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        present = os.fstat(self._descriptor).st_size
        self.size = min(present, _end_of_lines(self._descriptor, present if size is None else min(size, present)))
        if self.size < present:
            guard()
            os.ftruncate(self._descriptor, self.size)
        self._synced_folder = False

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Add lines. Raises OSError only after many that could not be written."""
        self._guard()
        added = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self._unwritten += added
        self.size += len(added)
        try:
            self._write()
        except OSError as error:
            if len(self._unwritten) > MAX_UNWRITTEN_BYTES:
                raise
            if not self._failing:
                log.error("%s cannot be written: %s; its lines are kept in memory until it can", self.path, error)
            self._failing = True

    def sync(self) -> None:
        """Write all lines and flush them to disk. Raises OSError."""
        self._write()
        os.fsync(self._descriptor)
        if not self._synced_folder:
            atomic_file.fsync(self.path.parent)
            self._synced_folder = True

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor < 0:
            return
        try:
            self._write()
        except OSError as error:
            log.error("%s lacks its last %d bytes: %s", self.path, len(self._unwritten), error)
        os.close(self._descriptor)
        self._descriptor = -1

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        if self._failing:
            log.info("%s can be written again, and is complete", self.path)
        self._failing = False


def detach_writers(path: Path) -> None:
    """Replace a history by a copy, which no process has open: a suspended writer cannot add to it. Raises OSError.

    The cost depends on the length, unlike that of everything else here.
    """
    with path.open("rb") as old, atomic_file.replacing(path) as copy:
        shutil.copyfileobj(old, copy, 2**20)


def append_shared(path: Path, lines: Sequence[bytes]) -> None:
    """Append whole lines, below 4 KiB each, to a file of several writers. Raises OSError.

    On a local file system the lines of several writers never mix. NFS has no atomic append: therefore the file is
    locked (a POSIX lock, which NFS passes to its server, and after which a client reads the file's size again).
    Without locks, two hosts that write at once can lose or break a line.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # terminate half a line
        for line in lines:
            os.write(descriptor, line)
    finally:
        os.close(descriptor)  # also releases the lock


def read(path: Path, count: int | None = None, start: int = 0) -> Iterator[Any]:
    """Yield the first `count` lines, or all, from byte `start`; none without a file.

    Lines that are not JSON, such as half a line at the end, are left out, with one warning. Raises OSError.
    """
    if not path.is_file():
        return
    broken, line = 0, b"\n"
    with path.open("rb") as file:
        file.seek(start)
        for line in islice(file, count):
            try:
                content = json.loads(line)
            except ValueError:  # of UTF-8, too
                broken += 1
                continue
            yield content
    if not line.endswith(b"\n"):
        log.warning("%s ends in half a line (%d bytes), which is left out", path, len(line))
    elif broken:
        log.warning("%s has %d broken lines, which are left out", path, broken)


def offset_of_line(path: Path, count: int) -> int:
    """Size in bytes of the first `count` lines, or of all complete ones if there are fewer. Reads them all."""
    if not count or not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(len(line) for line in islice(file, count) if line.endswith(b"\n"))


def is_line_end(path: Path, size: int) -> bool:
    """Whether the first `size` bytes of a file are there and are complete lines."""
    if not path.is_file():
        return size == 0
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size >= size and _end_of_lines(file.fileno(), size) == size


def kept_size(path: Path, keep: Callable[[Any], bool]) -> int:
    """Size of a file without the lines at its end that `keep` refuses or that are broken. Raises OSError.

    It reads no more than these lines and the one before them.
    """
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while size and not _is_kept(file.fileno(), start := _end_of_lines(file.fileno(), size - 1), size, keep):
            size = start
        return size


class Tail:
    """Reads the lines of a history that are new since the last call, also after its last lines were cut off."""

    def __init__(self, path: Path, marks: Iterable[Sequence[int]] = ()) -> None:
        """`marks`: those of another Tail of the file, to continue where it ended."""
        self.path = path
        self._lines: deque[Sequence[int]] = deque(marks, _KNOWN_LINES)  # start, end, checksum of each line read
        self._size, self._failing = -1, False  # size of the file at the last call

    @property
    def marks(self) -> list[list[int]]:
        """Start, end and checksum of the last lines that were read."""
        return [list(mark) for mark in self._lines]

    def poll(self, most: int | None = None) -> list[Any]:
        """The new lines, oldest first, or the first `most` of them; none while the file is missing or cannot be read.

        Broken lines are left out.
        """
        try:
            return self._read_new(most) if self.path.stat().st_size != self._size else []
        except FileNotFoundError:
            return []
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be read: %s", self.path, error)
            self._failing = True
            return []

    def _read_new(self, most: int | None) -> list[Any]:
        with self.path.open("rb") as file:
            while self._lines and not _is_same(file.fileno(), *self._lines[-1]):
                self._lines.pop()
            position = self._lines[-1][1] if self._lines else 0
            file.seek(position)
            found = []
            for line in islice(file, most):
                if not line.endswith(b"\n"):
                    break  # its writer has not finished it
                self._lines.append((position, position + len(line), zlib.crc32(line)))
                position += len(line)
                try:
                    found.append(json.loads(line))
                except ValueError:
                    log.warning("%s has a broken line, which is left out", self.path)
        self._size, self._failing = position, False
        return found


def _is_same(descriptor: int, start: int, end: int, checksum: int) -> bool:
    return zlib.crc32(os.pread(descriptor, end - start, start)) == checksum


def _is_kept(descriptor: int, start: int, end: int, keep: Callable[[Any], bool]) -> bool:
    line = os.pread(descriptor, end - start, start)
    try:
        return line.endswith(b"\n") and keep(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return False


def _end_of_lines(descriptor: int, size: int) -> int:
    """Position after the last complete line in the first `size` bytes."""
    while size:
        start = max(0, size - _BLOCK_BYTES)
        if (found := os.pread(descriptor, size - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        size = start
    return 0


def _lock(descriptor: int) -> None:
    """Take the lock, or continue without it after a timeout: a lost line is better than a process that hangs."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:  # this file system has no locks
            return None
