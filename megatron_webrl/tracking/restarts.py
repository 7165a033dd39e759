"""restarts.jsonl: what was started again in a run, and why. A line for each time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

FILE = "restarts.jsonl"


def note(folder: Path, role: str, reason: str) -> None:
    """A role is started again. All trainer ranks together are one restart, of the rank that ended first."""
    line = {"role": role, "reason": reason, "at": round(time.time(), 3), "version": _version(folder)}
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run; docs/summary.md describes the fields."""
    path = folder / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _version(folder: Path) -> int:
    """Of the policy, by the updates that have been written down."""
    path = folder / "updates.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return int(json.loads(lines[-1])["version"]) if lines else 0
