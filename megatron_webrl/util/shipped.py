"""Files that come with the package: configurations, prompts of judges, tiny models."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOTS = (PACKAGE.parent, PACKAGE / "shipped")  # a source tree, and an installed wheel (setup.py)
FOLDERS = ("configs", "models")


def find_shipped(path: str | Path) -> Path:
    """The path itself, or, of a relative one in FOLDERS that is not there, that of the package if it has it."""
    path = Path(path)
    if path.is_absolute() or path.exists() or path.parts[:1] not in [(name,) for name in FOLDERS]:
        return path
    return next((root / path for root in ROOTS if (root / path).exists()), path)
