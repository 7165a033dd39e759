"""The episodes of a run: a line for each, and the stored ones.

    episodes.jsonl                        a line for every episode that was trained or dropped
    rolled_back.jsonl                     lines after the checkpoint that a trainer resumed from in its job; the tickets
                                          are issued again
    episodes/<worker>/00000012.records    the episodes of a group, or one of an evaluation (ring/record_file.py)
    episodes/<worker>/index.jsonl         a line for each stored episode, also of files that are deleted since

Stored episodes are complete with screenshots: what people look at. Training never reads them. Each worker writes its
own folder, within its share of tracking.episodes_gib, and deletes its oldest files first. The first worker's share also
holds the files of workers that a resumed run no longer has, which it deletes before its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import RecordFileWriter, decode_trajectory, encode_trajectory, read_record_file
from megatron_webrl.types import Trajectory
from megatron_webrl.util import history
from megatron_webrl.util.atomic_file import continue_without
from megatron_webrl.util.history import History

log = logging.getLogger(__name__)

FILE, ROLLED_BACK_FILE = "episodes.jsonl", "rolled_back.jsonl"
TRAINED = "trained"
FOLDER, INDEX_FILE = "episodes", "index.jsonl"
TRAINING = "training"
MAX_INSTRUCTION_CHARACTERS = 500  # of an index line


class EpisodeLog:
    """Writes one line per counted episode. The file has as many lines as the accounting has closed episodes."""

    def __init__(
        self, folder: Path, closed: int, size: int | None = None, guard: Callable[[], object] = lambda: None
    ) -> None:
        """`closed`: number of lines to keep, those before the checkpoint of a resumed run; later lines are cut off.

        `size`: that of these lines in bytes, as `size` was at the checkpoint; without it the lines are counted.
        `guard`: as of History.
        """
        self.history = History(folder / FILE, size_of_lines(folder, closed, size), guard)

    @property
    def size(self) -> int:
        """Bytes of all lines."""
        return self.history.size

    def add(self, trajectory: Trajectory, reason: str | None, version: int) -> None:
        """Log an episode as trained, or as dropped for `reason`, at the trainer's `version`."""
        self.history.append(episode_line(trajectory, reason, version))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self.history.close()


def size_of_lines(folder: Path, count: int, size: int | None = None) -> int:
    """Bytes of the first `count` lines: `size` if it fits the file, else the lines are counted."""
    path = folder / FILE
    if size is not None and history.is_line_end(path, size):
        return size
    found = history.offset_of_line(path, count)
    if count and (lines := sum(1 for _ in history.read(path, count))) < count:
        log.warning("%s has %d lines of the %d episodes before the resume", path, lines, count)
    return found


def episode_line(trajectory: Trajectory, reason: str | None, version: int) -> dict[str, Any]:
    """The line of an episode (docs/operations.md). The stages of the verdict are in the trajectory."""
    verdict = None
    if (found := trajectory.verdict) is not None:
        verdict = {name: getattr(found, name) for name in _VERDICT} | {"seconds": round(found.seconds, 4)}
    return {
        **identity_fields(trajectory),
        "task": trajectory.task.id,
        "environment": trajectory.task.environment,
        "difficulty": trajectory.task.difficulty,
        "outcome": trajectory.outcome,
        "disposition": reason or TRAINED,
        "verdict": verdict,
        "version": version,
        "oldest_version": trajectory.oldest_version,
        "tries": trajectory.tries,
        "seconds": round(trajectory.seconds, 4),
        "steps": [
            {
                "prompt_tokens": len(step.prompt_token_ids),
                "cached_tokens": step.cached_prompt_tokens,
                "response_tokens": len(step.response_token_ids),
                "generation_seconds": round(step.seconds_generation, 4),
                "browser_seconds": round(step.seconds_browser, 4),
            }
            for step in trajectory.steps
        ],
    }


_VERDICT = ("evaluator", "protocol", "prompts", "reason", "calls", "prompt_tokens", "response_tokens", "dollars")

EpisodeIdentity = tuple[int, int, str, float]  # of one run of an episode: ticket, index, worker's instance id, end time


def line_identity(line: Mapping[str, Any]) -> EpisodeIdentity:
    return line["ticket"], line["index"], line["worker"], line["finished_at"]


def identity_fields(trajectory: Trajectory) -> dict[str, Any]:
    names = ("ticket", "index", "worker")
    return {name: getattr(trajectory, name) for name in names} | {"finished_at": round(trajectory.finished_at, 3)}


def trajectory_identity(trajectory: Trajectory) -> EpisodeIdentity:
    return line_identity(identity_fields(trajectory))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's log; none without a file."""
    return list(history.read(folder / FILE))


def iterate_lines(folder: Path, start: int, count: int | None = None) -> Iterator[dict[str, Any]]:
    """`count` lines from byte `start` of a run's log, or all from there."""
    return history.read(folder / FILE, count, start)


def read_rolled_back(folder: Path) -> list[dict[str, Any]]:
    return list(history.read(folder / ROLLED_BACK_FILE))


def roll_back(
    folder: Path, closed: int, present: Container[EpisodeIdentity], size: int | None = None
) -> list[dict[str, Any]]:
    """Copy lines after the first `closed` ones to rolled_back.jsonl, unless their episodes are `present` in a ring.

    `size`: as of EpisodeLog. Returns all lines rolled back in the job. A repeated call, after a crash, changes nothing.
    """
    rolled_back = read_rolled_back(folder)
    known = {line_identity(line) for line in rolled_back}
    added = [
        line
        for line in iterate_lines(folder, size_of_lines(folder, closed, size))
        if line_identity(line) not in known and line_identity(line) not in present
    ]
    written = History(folder / ROLLED_BACK_FILE)
    try:
        written.append(*added)
        written.sync()
    finally:
        written.close()
    return rolled_back + added


def clear_rolled_back(folder: Path) -> None:
    """Delete rolled_back.jsonl at the start of a job."""
    (folder / ROLLED_BACK_FILE).unlink(missing_ok=True)


class EpisodeStore:
    """Writes the episodes of one worker, from any thread. A disk that fails costs the episode, and no more."""

    def __init__(self, folder: Path, limit_bytes: int, workers: Sequence[str] = ()) -> None:
        """`folder`: the worker's. `limit_bytes`: of its record files; with 0 nothing is stored.

        `workers`: of the job; record files of others count as the oldest of the first of them.
        """
        self.folder, self.limit_bytes = folder, limit_bytes
        self._files: deque[tuple[Path, int]] = deque()  # with sizes, oldest first
        self._index: History | None = None
        self._next = 1
        self._lock = threading.Lock()
        if limit_bytes:
            with continue_without(str(folder)):
                folder.mkdir(parents=True, exist_ok=True)
                own = record_files(folder)
                self._next = 1 + max((int(path.stem) for path in own), default=0)
                left: list[Path] = []
                if folder.name in workers[:1]:
                    others = [path for path in folder.parent.iterdir() if path.is_dir() and path.name not in workers]
                    left = [path for other in others for path in record_files(other)]
                    left.sort(key=lambda path: path.stat().st_mtime)
                self._files.extend((path, path.stat().st_size) for path in (*left, *own))
                self._index = History(folder / INDEX_FILE, None if own else 0)

    @classmethod
    def of_worker(cls, config: Config, worker: str) -> EpisodeStore:
        """The store of a worker of a run, with an equal share of the space."""
        share = int(config.tracking.episodes_gib * 2**30 / config.rollout.engines)
        return cls(config.run_folder / FOLDER / worker, share, config.worker_names)

    def add(self, trajectories: Sequence[Trajectory], kind: str = TRAINING) -> None:
        """Store episodes that ended together, and delete the oldest files beyond the limit.

        `kind`: TRAINING, or that of an evaluation.
        """
        with self._lock:
            if self._index is None or not trajectories:
                return
            path, lines = self.folder / f"{self._next:08d}.records", []
            self._next += 1
            with continue_without(str(path)):
                with RecordFileWriter(path) as file:
                    for trajectory in trajectories:
                        position = file.write(encode_trajectory(trajectory))
                        lines.append({"file": path.name, "position": position, "kind": kind, **describe(trajectory)})
                self._files.append((path, path.stat().st_size))
                self._index.append(*lines)
                while len(self._files) > 1 and sum(size for _, size in self._files) > self.limit_bytes:
                    self._files.popleft()[0].unlink(missing_ok=True)

    def close(self) -> None:
        """Close the index: nothing is stored any more. A second call does nothing."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None


@dataclass(frozen=True)
class StoredEpisode:
    """An episode as a worker has stored it."""

    kind: str  # TRAINING, or the name of an evaluation
    worker: str
    trajectory: Trajectory


def read_episodes(run_folder: Path) -> Iterator[StoredEpisode]:
    """The stored episodes of a run by worker, oldest first. Raises RecordError, OSError, ValueError: broken files."""
    for folder in sorted(path for path in (run_folder / FOLDER).glob("*") if path.is_dir()):
        kinds: dict[str, list[str]] = {}  # of the episodes of each file, in their order
        for line in history.read(folder / INDEX_FILE):
            kinds.setdefault(line["file"], []).append(line["kind"])
        for path in record_files(folder):
            for record, kind in zip(read_record_file(path), kinds.get(path.name, ()), strict=True):
                yield StoredEpisode(kind, folder.name, decode_trajectory(record, copy=True))


def record_files(folder: Path) -> list[Path]:
    """The record files of a worker, oldest first."""
    return sorted(folder.glob("*.records"))


def describe(trajectory: Trajectory) -> dict[str, Any]:
    """What an index knows of an episode."""
    task, steps, verdict = trajectory.task, trajectory.steps, trajectory.verdict
    names = ("outcome", "end_reason", "reward", "response_tokens", "oldest_version", "newest_version", "tries")
    return {
        **identity_fields(trajectory),
        "task": task.id,
        "source": task.source,
        "site": task.website or task.environment,
        "difficulty": task.difficulty,
        "instruction": trajectory.instruction[:MAX_INSTRUCTION_CHARACTERS],
        **{name: getattr(trajectory, name) for name in names},
        "reason": "" if verdict is None else verdict.reason,
        "steps": len(steps),
        "format_errors": sum(step.format_error is not None for step in steps),
        "seconds": round(trajectory.seconds, 3),
    }
