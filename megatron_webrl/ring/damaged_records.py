"""Read records of which some may be damaged: their bytes are set aside for a look at what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from megatron_webrl.ring.errors import RecordCorrupt, RecordError, RingError
from megatron_webrl.ring.record import Buffer, decode_trajectory
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

FOLDER = "damaged_records"  # of a run
MAX_KEPT = 20  # files in that folder


class RecordReader(Protocol):
    """A ring, or another source of numbered records."""

    def read(self, sequence: int, verify: bool = True) -> Buffer:
        """One record. Raises RecordCorrupt."""
        ...


def read_trajectory(records: RecordReader, sequence: int, folder: Path) -> Trajectory | None:
    """The trajectory of a record, as views of it; None if it is damaged: its bytes are then in a file of `folder`."""
    try:
        return decode_trajectory(records.read(sequence))
    except (RecordCorrupt, RecordError) as error:
        log.error("record %d is damaged: %s", sequence, error)
        with suppress(RingError, OSError):  # the place of the record, or the disk, may be damaged, too
            _keep(records.read(sequence, verify=False), folder, f"{sequence}.record")
        return None


def undamaged_trajectories(records: RecordReader, sequences: Iterable[int]) -> dict[int, Trajectory]:
    """The trajectories of the records that are not damaged, by number."""
    found = {}
    for sequence in sequences:
        with suppress(RecordCorrupt, RecordError):
            found[sequence] = decode_trajectory(records.read(sequence))
    return found


def _keep(data: Buffer, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if len(data) and len(list(folder.iterdir())) < MAX_KEPT:
        (folder / name).write_bytes(data)
