"""What vLLM leaves in shared memory when an engine of several CPU ranks is killed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PATTERN = "vllm_dist_*cpushm*"  # of its communicator between CPU ranks, which removes them only when it ends by itself


def sweep_engine_segments(folder: Path = _FOLDER) -> list[str]:
    """Remove the segments of this user that no process maps; returns their names."""
    found, mapped, removed = sorted(folder.glob(_PATTERN)), set[str](), list[str]()
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):  # it ended, or belongs to another user, who cannot map our files
            lines = maps.read_text(errors="replace").splitlines()
            mapped |= {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    for path in found:
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid() and str(path) not in mapped:
                path.unlink()
                removed.append(path.name)
    return removed
