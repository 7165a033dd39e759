"""mlflow.jsonl: everything a run logs to MLflow, one entry a line, in order. The upload reads it, now or later.

An entry is one of {"params": {name: text}}, {"metrics": {name: value}, "step": version, "time": unix ms},
{"tags": {name: text}}, {"artifact": path in the run's folder, "folder": of MLflow}, {"status": of MLflow, "time": ms}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.history import append_shared

FILE = "mlflow.jsonl"
_READ_BYTES = 2**20
_ENDED = ("FINISHED", "KILLED", "FAILED")

Entry = dict[str, Any]
SUMMARY: Entry = {"artifact": "summary.json", "folder": ""}


def now_ms() -> int:
    """Unix time, ms."""
    return int(steady_time() * 1000)


def status_entry(status: str) -> Entry:
    """The entry of a run's status in MLflow, from now on."""
    return {"status": status, "time": now_ms()}


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


def end_as_failed(folder: Path) -> None:
    """End the run as FAILED, with its summary, for a trainer that was killed. Does nothing without entries, or if the
    last of them ends the run. No trainer may write any more. Raises OSError.
    """
    path = folder / FILE
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
        lines = file.read().splitlines(keepends=True)
    last = next((entry for line in reversed(lines) if (entry := _entry(line)) is not None), {})
    if last.get("status") in _ENDED:
        return
    append_shared(path, [json.dumps(entry).encode() + b"\n" for entry in (SUMMARY, status_entry("FAILED"))])


def count_entries(folder: Path, position: int) -> int:
    """Entries from byte `position` on."""
    count = 0
    while entries := read_entries(folder, position):
        count, position = count + len(entries), entries[-1][0]
    return count
