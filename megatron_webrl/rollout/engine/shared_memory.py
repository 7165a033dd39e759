"""What vLLM leaves in shared memory when an engine of several CPU ranks is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PATTERN = "vllm_dist_*cpushm*"  # of its communicator between CPU ranks, which removes them only when it ends by itself


def sweep_engine_segments(folder: Path = _FOLDER) -> list[str]:
    """Remove the segments of this user that no process maps; returns their names."""
    found = [path for path in sorted(folder.glob(_PATTERN)) if _is_ours(path)]
    mapped = set(_mapped_files()) if found else set()
    removed = [path for path in found if str(path) not in mapped]
    for path in removed:
        path.unlink(missing_ok=True)
    return [path.name for path in removed]


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _mapped_files() -> Iterator[str]:
    """Paths of the files that processes of this user map; those of other users cannot be read, nor map our files."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # it ended, or belongs to another user
            continue
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5]
