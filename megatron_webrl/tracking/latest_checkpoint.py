"""Find the newest complete checkpoint of a run without importing torch."""

from __future__ import annotations

from pathlib import Path


def find_latest_checkpoint(run_folder: Path) -> Path | None:
    """The folder that `checkpoints/latest` names; None without one."""
    pointer = run_folder / "checkpoints" / "latest"
    return pointer.with_name(pointer.read_text().strip()) if pointer.is_file() else None
