"""What vLLM leaves in shared memory when an engine of several CPU ranks is killed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PATTERN = "vllm_dist_*cpushm*"  # of its communicator between CPU ranks, which removes them only when it ends by itself


def sweep_engine_segments(folder: Path = _FOLDER) -> list[str]:
    """Remove the segments of this user that no process maps; returns their names."""
    found, mapped = sorted(folder.glob(_PATTERN)), ""
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):  # it ended, or belongs to another user, who cannot map our files
            mapped += maps.read_text(errors="replace")
    unused = [path for path in found if path.lstat().st_uid == os.geteuid() and str(path) not in mapped]
    for path in unused:
        path.unlink(missing_ok=True)
    return [path.name for path in unused]
