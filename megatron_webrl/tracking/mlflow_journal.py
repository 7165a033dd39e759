"""mlflow.jsonl: everything a run logs to MLflow, one entry a line, in order. The upload reads it, now or later.

An entry is one of {"params": {name: text}}, {"metrics": {name: value}, "step": version, "time": unix ms},
{"tags": {name: text}}, {"artifact": path in the run's folder, "folder": of MLflow}, {"status": of MLflow, "time": ms}.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

from megatron_webrl.system.text import first_line

log = logging.getLogger(__name__)

FILE = "mlflow.jsonl"
MAX_UNWRITTEN = 1_000  # entries kept in memory while the file cannot be written
_READ_BYTES = 2**20

Entry = dict[str, Any]


class JournalWriter:
    """Appends entries. On a full disk it keeps them in memory, and writes them with a later one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.lost = 0  # entries
        self._unwritten: list[bytes] = []

    def is_empty(self) -> bool:
        return not self._unwritten and (not self.path.exists() or not self.path.stat().st_size)

    def append(self, *entries: Entry) -> None:
        """Write entries, or keep them for the next call if the file cannot be written. Does not raise OSError."""
        self._unwritten += [json.dumps(entry).encode() + b"\n" for entry in entries]
        try:
            _append(self.path, b"".join(self._unwritten))
        except OSError as error:
            dropped = max(0, len(self._unwritten) - MAX_UNWRITTEN)
            self.lost += dropped
            del self._unwritten[:dropped]
            log.error(
                "%s cannot be written (%s): %d entries for MLflow wait in memory, %d are lost; make room",
                self.path,
                first_line(error),
                len(self._unwritten),
                self.lost,
            )
        else:
            self._unwritten.clear()


def _append(path: Path, data: bytes) -> None:
    """Append whole lines or nothing. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a writer was killed in the middle of a line
            data = b"\n" + data
        if (written := os.write(descriptor, data)) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes written")
    finally:
        os.close(descriptor)


def read_entries(folder: Path, position: int) -> list[tuple[int, Entry | None]]:
    """At most 1 MiB of whole entries from byte `position` on, each with the position after it; None: a damaged line.

    They are on disk before they are returned: a position that a caller stores never lies beyond the file.
    """
    path = folder / FILE
    if not path.exists():
        return []
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if position > os.fstat(file.fileno()).st_size:
            position = 0  # another file: MLflow ignores what it has already
        file.seek(position)
        data = file.read(_READ_BYTES)
        if data and b"\n" not in data:
            data += file.readline()
    found: list[tuple[int, Entry | None]] = []
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        position += len(line)
        if line.strip():
            found.append((position, _entry(line)))
    return found


def _entry(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def count_entries(folder: Path, position: int) -> int:
    """Entries from byte `position` on."""
    count = 0
    while entries := read_entries(folder, position):
        count, position = count + len(entries), entries[-1][0]
    return count
