"""Drill: what writes a file survives a disk that is full, read-only or broken, as documented.

    python -m tools.drills.file_errors [--quick] [--json FILE]

Lets each writer of state files and histories meet ENOSPC, EROFS and EIO at each of its file operations, once, and from
there on for good, in processes of their own; in the short form at every third operation. After the error the disk is
well again, and the writer must be able to complete its work. A writer that refuses raises an error and leaves the old
content; one that goes without logs it. Temporary files must be gone. As root it also fills a real, small disk, and
remounts it read-only.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.budget import Usage, read_usage, write_usage
from megatron_webrl.ring.record import RecordFileWriter, read_record_file
from megatron_webrl.track import events, summary
from megatron_webrl.track.evaluations import EvaluationLog
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import start_launch
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.data.task_sampler import BlockList
from megatron_webrl.types import BLOCKED, Group
from megatron_webrl.util import atomic_file, history
from megatron_webrl.util.history import History
from tests.trajectories import trajectory
from tools.drills.crash_points import MEMORY, Trainer
from tools.drills.file_faults import FileFaults, run_forked
from tools.drills.report import Findings, run

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO)
RAISED = (OSError, ConfigError, CheckpointError)
FOR_GOOD = 1_000_000
DISK_KIB = 256


@dataclass(frozen=True)
class Writer:
    """Something that writes a file: `write(folder, n)` stores the number n, `read` returns the numbers found."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], list[int]]
    raises: bool  # what its callers handle; others log the error
    grows: bool = False  # a history: a number that could not be written may be missing, the others are there


def _numbers(name: str) -> Callable[[Path], list[int]]:
    return lambda folder: [json.loads((folder / name).read_text())["n"]] if (folder / name).exists() else []


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


def _evaluate(folder: Path, number: int) -> None:
    evaluations = EvaluationLog(folder)
    evaluations.append({"version": number, "kind": "during", "variant": ""}, [])
    evaluations.history.sync()
    evaluations.history.close()


def _checkpoint(folder: Path, number: int) -> None:
    with start_launch(folder, {}) as launch:
        Trainer(folder, launch).update()


def _version(folder: Path) -> list[int]:
    newest = find_latest_checkpoint(folder)
    if newest is None:
        return []
    return [json.loads((newest / name).read_text())["version"] for name in ("megatron/shard.distcp",)]


def _events(folder: Path) -> list[int]:
    return [event.node for event in events.read_events(folder)]


def _records(folder: Path) -> list[int]:
    path = folder / "records"
    return [content[0] for content in read_record_file(path)] if path.exists() else []


def _summary(folder: Path) -> list[int]:
    return [int(summary.read_summary(folder)["outcome"])] if (folder / "summary.json").exists() else []


def _usage(folder: Path) -> list[int]:
    return [hour for hour in [read_usage(folder / "u.json")[0]] if hour >= 0]


WRITERS = {
    "state file": Writer(lambda f, n: atomic_file.write_json(f / "s.json", {"n": n}), _numbers("s.json"), True),
    "history": Writer(_append, _lines("h.jsonl"), True, True),
    "events": Writer(lambda f, n: EventLog(f, node=n).add("job", "started"), _events, False, True),
    "block list": Writer(_block, _lines("blocklist.jsonl", "ticket"), False, True),
    "evaluations": Writer(_evaluate, _lines("evaluations.jsonl", "version"), True, True),
    "record file": Writer(_record, _records, True),
    "summary": Writer(lambda f, n: summary.write_summary(f, str(n), None), _summary, False),
    "judge's usage": Writer(lambda f, n: write_usage(f / "u.json", n, Usage()), _usage, True),
    "checkpoint": Writer(_checkpoint, _version, True),
}


def measure(quick: bool) -> Findings:
    """Let each writer fail in each way."""
    logging.disable(logging.ERROR)
    findings, counts = Findings(), Counter[str]()
    try:
        for name, writer in WRITERS.items():
            operations = _count(writer)
            for error in ERRORS:
                for at in range(1, operations + 1, 3 if quick else 1):
                    for until in (at, FOR_GOOD):
                        counts[name] += 1
                        if problem := _fail(writer, at, until, error):
                            how = "once" if until == at else "for good"
                            findings.problems.append(f"{name}, {errno.errorcode[error]} at {at} {how}: {problem}")
        if os.geteuid() == 0:
            findings.problems += _real_disk(counts)
    finally:
        logging.disable(logging.NOTSET)
    findings.figures = {f"failures of {name}": count for name, count in counts.items()} | {"failures": counts.total()}
    return findings


def _count(writer: Writer) -> int:
    """File operations of a write that replaces or follows another one."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        writer.write(Path(name), 1)
        with FileFaults(Path(name)) as faults:
            writer.write(Path(name), 2)
        return faults.count


def _fail(writer: Writer, at: int, until: int, error: int) -> str:
    """What is wrong with a writer that fails; empty if nothing."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder, report = Path(name, "run"), Path(name, "report")
        folder.mkdir()

        def job() -> None:
            writer.write(folder, 1)
            raised = ""
            try:
                with FileFaults(folder, at, error, until=until) as faults:
                    writer.write(folder, 2)
            except RAISED as failure:
                raised = type(failure).__name__
            # A temporary file that cannot be removed is removed by the next start, as that of a killed process is.
            may_remove = until == at and faults.names[at - 1] != "unlink"
            report.write_text(_judge(writer, folder, raised, may_remove))

        return report.read_text() if run_forked(job) == 0 else "it raised what no caller handles"


def _judge(writer: Writer, folder: Path, raised: str, may_remove: bool) -> str:
    found = writer.read(folder)
    if found not in ([[1], [1, 2]] if writer.grows else [[1], [2]]):
        return f"{found} is left"
    if raised and not writer.raises:
        return f"{raised} is raised"
    writer.write(folder, 3)  # the disk is well again
    found = writer.read(folder)
    if writer is WRITERS["checkpoint"]:
        if found not in ([2], [3]):
            return f"the next checkpoint holds {found}"
    elif found != [3] and not (writer.grows and found in ([1, 3], [1, 2, 3])):
        return f"after the next write {found} is there"
    left = [path.name for path in folder.rglob("*.writing")] if may_remove else []
    return f"left over: {left}" if left else ""


@contextmanager
def _small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_KIB}k", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


def _real_disk(counts: Counter[str]) -> list[str]:
    """Each writer on a disk that is full, then read-only, then well again."""
    problems = []
    for name, writer in WRITERS.items():
        try:
            disk = _small_disk()
            with disk as folder:
                problems += [f"{name}, on a disk: {problem}" for problem in _fill(writer, folder)]
                counts["a real disk"] += 2
        except subprocess.CalledProcessError:
            return problems  # no right to mount
    return problems


def _write(writer: Writer, folder: Path) -> None:
    try:
        writer.write(folder, 2)
    except RAISED:
        if not writer.raises:
            raise


def _fill(writer: Writer, folder: Path) -> list[str]:
    problems = []
    run_forked(lambda: writer.write(folder, 1))
    for way in ("full", "read-only"):
        ballast = folder / "ballast"
        if way == "full":
            with ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        if run_forked(lambda: _write(writer, folder)):  # its open files must not prevent the next mount
            problems.append(f"{way}: it raised what no caller handles")
        if way == "full":
            ballast.unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        if not set(writer.read(folder)) <= {1, 2} or not writer.read(folder):
            problems.append(f"{way}: {writer.read(folder)} is left")
    run_forked(lambda: writer.write(folder, 3))
    if writer.read(folder)[-1:] not in ([2], [3]):
        problems.append(f"after the next write {writer.read(folder)} is there")
    return problems


if __name__ == "__main__":
    sys.exit(run("file_errors", __doc__.split("\n")[0], measure))
