"""Groups of an update in record files of the run, one a version: version-000003.records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_webrl.ring.record import decode, encode
from megatron_webrl.ring.record_file import RecordFileWriter, read_record_file
from megatron_webrl.types import Group, Trajectory

_FILE = re.compile(r"version-(\d{6,})\.records")


def path_of(folder: Path, version: int) -> Path:
    """The file of what the update from policy `version` on was trained on."""
    return folder / f"version-{version:06d}.records"


def version_of(path: Path) -> int | None:
    """The version of a file; None for any other file."""
    match = _FILE.fullmatch(path.name)
    return int(match[1]) if match else None


def write(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Store trajectories, one in memory at a time. The file gets its name when it is complete. Raises OSError."""
    with RecordFileWriter(path) as file:
        for trajectory in trajectories:
            file.write(encode(trajectory))


def read_groups(path: Path) -> list[Group]:
    """What `write` stored, as the groups of its tickets, in the order in which they were stored.

    Raises RecordError for a damaged file, OSError without one.
    """
    found: dict[int, list[Trajectory]] = {}
    for record in read_record_file(path):
        trajectory = decode(record)
        found.setdefault(trajectory.ticket, []).append(trajectory)
    return [Group(ticket, tuple(trajectories)) for ticket, trajectories in found.items()]
