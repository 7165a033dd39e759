"""What writes a file of a run survives a disk that is full, read-only or broken, and a power failure.

Each writer of state files and histories meets ENOSPC, EROFS and EIO at each of its file operations, once, and from
there on for good. After the error the disk is well again, and the writer must be able to complete its work. A writer
that refuses raises an error and leaves the old content; one that goes without logs it. No temporary file is left.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.ring.record import RecordFileWriter, read_record_file
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from megatron_webrl.trainer.data.task_sampler import BlockList
from megatron_webrl.types import BLOCKED, Group
from megatron_webrl.util import atomic_file, history
from megatron_webrl.util.history import History
from tests.file_faults import FileFaults, run_forked
from tests.trajectories import trajectory

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO)
RAISED = (OSError, ConfigError)
MEMORY = "/dev/shm"  # where fsync takes no time


@dataclass(frozen=True)
class Writer:
    """Something that writes a file: `write(folder, n)` stores the number n, `read` returns the numbers found."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], list[int]]
    raises: bool  # what its callers handle; others log the error
    grows: bool = False  # a history: a number that could not be written may be missing, the others are there


def _numbers(name: str, key: str = "n") -> Callable[[Path], list[int]]:
    return lambda folder: [int(json.loads((folder / name).read_text())[key])] if (folder / name).exists() else []


def _lines(name: str, key: str = "n") -> Callable[[Path], list[int]]:
    return lambda folder: [line[key] for line in history.read(folder / name)]


def _append(folder: Path, number: int) -> None:
    """As the trainer does, except that it opens the file once."""
    grown = History(folder / "h.jsonl")
    grown.append({"n": number})
    grown.sync()
    grown.close()


def _record(folder: Path, number: int) -> None:
    with RecordFileWriter(folder / "records") as file:
        file.write([bytes([number])])


def _block(folder: Path, number: int) -> None:
    blocked = BlockList({}, folder / "blocklist.jsonl")
    made = trajectory(number, outcome=BLOCKED)
    blocked.record_group(Group(number, (replace(made, task=replace(made.task, website="example.org")),)))


def _events(folder: Path) -> list[int]:
    return [event.node for event in events.read_events(folder)]


def _records(folder: Path) -> list[int]:
    path = folder / "records"
    return [content[0] for content in read_record_file(path)] if path.exists() else []


WRITERS = {
    "state file": Writer(lambda f, n: atomic_file.write_json(f / "s.json", {"n": n}), _numbers("s.json"), True),
    "history": Writer(_append, _lines("h.jsonl"), True, True),
    "events": Writer(lambda f, n: EventLog(f, node=n).add("job", "started"), _events, False, True),
    "block list": Writer(_block, _lines("blocklist.jsonl", "ticket"), False, True),
    "record file": Writer(_record, _records, True),
    "summary": Writer(lambda f, n: summary.write_summary(f, str(n), None), _numbers("summary.json", "outcome"), False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_survives_a_disk_that_fails(name: str) -> None:
    writer = WRITERS[name]
    with tempfile.TemporaryDirectory(dir=MEMORY) as sound:
        writer.write(Path(sound), 1)
        with FileFaults(Path(sound)) as faults:
            writer.write(Path(sound), 2)
        operations = faults.count
    for error, at, for_good in itertools.product(ERRORS, range(1, operations + 1), (False, True)):
        how = f"{errno.errorcode[error]} at operation {at} {'for good' if for_good else 'once'}"
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            folder = Path(name)
            writer.write(folder, 1)
            with FileFaults(folder, at, error, until=1_000_000 if for_good else at) as faults:
                try:
                    writer.write(folder, 2)
                except RAISED:
                    assert writer.raises, how
            assert writer.read(folder) in ([[1], [1, 2]] if writer.grows else [[1], [2]]), how
            writer.write(folder, 3)  # the disk is well again
            found = writer.read(folder)
            assert found == [3] or (writer.grows and found in ([1, 3], [1, 2, 3])), how
            # A temporary file that cannot be removed is removed by the next start, as that of a killed process is.
            if not for_good and faults.names[at - 1] != "unlink":
                assert not list(folder.rglob("*.writing")), how


@pytest.mark.parametrize("name", [name for name, writer in WRITERS.items() if name not in ("events", "block list")])
def test_what_a_writer_has_stored_survives_a_power_failure(name: str) -> None:
    """Content is on disk before the name, and the name before the return. Events and blocks may be lost."""
    writer = WRITERS[name]
    for before, seed in itertools.product((True, False), range(4)):
        with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
            folder = Path(memory, "run")
            folder.mkdir()
            if before:
                writer.write(folder, 1)

            def crash(folder: Path = folder, seed: int = seed) -> None:
                with FileFaults(folder, power_loss=True, seed=seed) as faults:
                    writer.write(folder, 2)
                    faults.crash()

            assert run_forked(crash) == -signal.SIGKILL
            assert writer.read(folder) == ([1, 2] if before and writer.grows else [2])


def test_an_interrupt_leaves_no_temporary_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_file.replacing(tmp_path / "state"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_not_on_disk_is_an_error_unless_no_folder_can_be_synced(tmp_path: Path) -> None:
    with FileFaults(tmp_path) as faults:
        atomic_file.write_text(tmp_path / "state", "old")
    assert faults.names[-1] == "fsync"
    for error in (errno.EIO, errno.ENOSPC):
        with FileFaults(tmp_path, faults.count, error), pytest.raises(OSError, match=os.strerror(error)):
            atomic_file.write_text(tmp_path / "state", "new")
    with FileFaults(tmp_path, faults.count, errno.EINVAL):
        atomic_file.write_text(tmp_path / "state", "newest")
    assert (tmp_path / "state").read_text() == "newest"
