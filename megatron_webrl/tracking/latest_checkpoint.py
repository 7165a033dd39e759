"""Find the newest complete checkpoint of a run without importing torch."""

from __future__ import annotations

from pathlib import Path


def find_latest_checkpoint(folder: Path) -> Path | None:
    """Of the run in a folder; None without one."""
    pointer = folder / "checkpoints" / "latest"
    return pointer.with_name(pointer.read_text().strip()) if pointer.is_file() else None
