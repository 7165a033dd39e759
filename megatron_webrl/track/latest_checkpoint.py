"""Find the newest complete checkpoint of a run without importing torch."""

from __future__ import annotations

import re
from pathlib import Path

_VERSION = re.compile(r"version-(\d{6,})(?:\.(\d+))?")


def find_latest_checkpoint(run_folder: Path) -> Path | None:
    """The folder that a run's `latest` names; None without one. Raises OSError."""
    pointer = run_folder / "checkpoints" / "latest"
    name = pointer.read_text().strip().rstrip("/") if pointer.is_file() else ""  # people point it back by hand
    return pointer.parent / name if name else None


def version_and_copy(path: Path) -> tuple[int, int] | None:
    """(version, copy) of a complete checkpoint's folder, None for anything else."""
    match = _VERSION.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None
