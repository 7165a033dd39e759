"""Groups of an update in record files of the run, one a version and node.

version-000003.records, version-000003.node-1.records: what came from the ring of the first node, and of the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.ring.record_file import RecordFileWriter, read_record_file
from megatron_webrl.types import Group, Trajectory

_FILE = re.compile(r"version-(\d{6,})(?:\.node-(\d+))?\.records")


def group_file_path(folder: Path, version: int, node: int = 0) -> Path:
    """The file of what the update from policy `version` on was trained on, as far as it came from a node's ring."""
    return folder / (f"version-{version:06d}" + (f".node-{node}" if node else "") + ".records")


def parse_version(path: Path) -> int | None:
    """The version of a file; None for any other file."""
    match = _FILE.fullmatch(path.name)
    return int(match[1]) if match else None


def list_group_files(folder: Path, node: int = 0, nodes: int = 1) -> list[tuple[int, Path]]:
    """Versions and paths of the files in a folder that fall to a node of `nodes`, in order.

    A node has its own, and shares those of nodes that there are no more with the others.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and int(match[2] or 0) % nodes == node:
            found.append((int(match[1]), int(match[2] or 0), path))
    return [(version, path) for version, _, path in sorted(found)]


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Store trajectories, one in memory at a time. The file gets its name when it is complete. Raises OSError."""
    with RecordFileWriter(path) as file:
        for trajectory in trajectories:
            file.write(encode_trajectory(trajectory))


def read_groups(path: Path) -> list[Group]:
    """What `write` stored, as the groups of its tickets, in the order in which they were stored.

    Raises RecordError for a damaged file, OSError without one.
    """
    return _groups([path])


def read_groups_of_version(folder: Path, version: int) -> list[Group]:
    """The same of all nodes' files of a version. Raises RecordError, and OSError if there are none."""
    paths = [path for stored, path in list_group_files(folder) if stored == version]
    return _groups(paths or [group_file_path(folder, version)])


def _groups(paths: Iterable[Path]) -> list[Group]:
    found: dict[int, list[Trajectory]] = {}
    for path in paths:
        for record in read_record_file(path):
            trajectory = decode_trajectory(record)
            found.setdefault(trajectory.ticket, []).append(trajectory)
    return [Group(ticket, tuple(sorted(each, key=lambda t: t.index))) for ticket, each in found.items()]
