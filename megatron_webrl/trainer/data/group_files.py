"""Record files of an update's groups by version and node: version-000003.records, version-000003.node-1.records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.types import Trajectory

_FILE = re.compile(r"version-(\d{6,})(?:\.node-(\d+))?\.records")


def group_file_path(folder: Path, version: int, node: int = 0) -> Path:
    """The file of the trajectories that the update from policy `version` took from the ring of `node`."""
    return folder / (f"version-{version:06d}" + (f".node-{node}" if node else "") + ".records")


def list_group_files(folder: Path, node: int = 0, nodes: int = 1) -> list[tuple[int, Path]]:
    """Sorted versions and paths of the files that a node reads: its own, and a share of those of nodes now gone."""
    files = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and int(match[2] or 0) % nodes == node:
            files.append((int(match[1]), int(match[2] or 0), path))
    return [(version, path) for version, _, path in sorted(files)]


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Store trajectories, one in memory at a time. The file gets its name when it is complete. Raises OSError."""
    with RecordFileWriter(path) as file:
        for trajectory in trajectories:
            file.write(encode_trajectory(trajectory))
