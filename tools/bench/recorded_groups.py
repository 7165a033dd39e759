"""Read the groups that a run stored with tracking.keep_records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.trainer.data.replay_buffer import group_file_path, list_group_files
from megatron_webrl.types import Group, Trajectory


def read_groups(path: Path) -> list[Group]:
    """The groups of one file, in the order in which they were stored. Raises RecordError, OSError."""
    return _groups([path])


def read_groups_of_version(folder: Path, version: int) -> list[Group]:
    """The groups of a version from the files of all nodes. Raises RecordError; OSError without a file."""
    paths = [path for stored, path in list_group_files(folder) if stored == version]
    return _groups(paths or [group_file_path(folder, version)])


def _groups(paths: Iterable[Path]) -> list[Group]:
    by_ticket: dict[int, list[Trajectory]] = {}
    for path in paths:
        for record in read_record_file(path):
            trajectory = decode_trajectory(record)
            by_ticket.setdefault(trajectory.ticket, []).append(trajectory)
    return [Group(ticket, tuple(sorted(each, key=lambda t: t.index))) for ticket, each in by_ticket.items()]
