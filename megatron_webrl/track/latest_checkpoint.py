"""Find the newest complete checkpoint of a run without importing torch.

runs/x/checkpoints/               the run's own checkpoints
runs/x/fallback-5f0c/checkpoints/ those that it could not take; a link to x-5f0c in trainer.checkpoint.fallback_folder
"""

from __future__ import annotations

import re
from pathlib import Path

FALLBACK_PREFIX = "fallback-"
_VERSION = re.compile(r"version-(\d{6,})(?:\.(\d+))?")


def find_latest_checkpoint(run_folder: Path) -> Path | None:
    """The newest of the folders that `latest` names, in the run and in its fallback folders; None without one.

    A version that is in both was written to the fallback folder later. Raises OSError.
    """
    folders = [link.resolve() for link in fallback_links(run_folder)]
    found = [checkpoint for folder in (*folders, run_folder) if (checkpoint := _named_latest(folder)) is not None]
    return max(found, key=lambda path: version_and_copy(path) or (-1, 0), default=None)


def fallback_links(run_folder: Path) -> list[Path]:
    """The links to a run's fallback folders, in order. Raises OSError."""
    return sorted(path for path in run_folder.glob(f"{FALLBACK_PREFIX}*") if path.is_symlink())


def fallback_of(run_folder: Path, fallback_folder: str) -> Path | None:
    """The folder of a run in trainer.checkpoint.fallback_folder; None without that setting. Raises OSError."""
    parent = Path(fallback_folder).resolve()
    found = [folder for link in fallback_links(run_folder) if (folder := link.resolve()).parent == parent]
    return found[0] if fallback_folder and found else None


def version_and_copy(path: Path) -> tuple[int, int] | None:
    """(version, copy) of a complete checkpoint's folder, None for anything else."""
    match = _VERSION.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _named_latest(run_folder: Path) -> Path | None:
    pointer = run_folder / "checkpoints" / "latest"
    name = pointer.read_text().strip().rstrip("/") if pointer.is_file() else ""  # people point it back by hand
    return pointer.parent / name if name else None
