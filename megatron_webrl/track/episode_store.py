"""Stored episodes of a run, complete with screenshots: what people look at. Training never reads them.

    episodes/<worker>/00000012.records    the episodes of a group, or one of an evaluation (ring/record_file.py)
    episodes/<worker>/index.jsonl         a line for each stored episode, also of files that are deleted since

Each worker writes its own folder, within its share of tracking.episodes_gib, and deletes its oldest files first. The
first worker's share also holds the files of workers that a resumed run no longer has, which it deletes before its own.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.record_file import RecordFileWriter
from megatron_webrl.track.episode_log import trajectory_identity
from megatron_webrl.types import Trajectory
from megatron_webrl.util.disk_faults import continue_without
from megatron_webrl.util.history import History

FOLDER, INDEX_FILE = "episodes", "index.jsonl"
TRAINING = "training"
MAX_INSTRUCTION_CHARACTERS = 500  # of an index line
_FILE = re.compile(r"(\d{8,})\.records")


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
                left = _record_files_of_others(folder.parent, workers) if folder.name in workers[:1] else []
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


def record_files(folder: Path) -> list[Path]:
    """The record files of a worker, oldest first."""
    return sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))


def _record_files_of_others(folder: Path, workers: Sequence[str]) -> list[Path]:
    """The record files of workers that a run no longer has, oldest first."""
    others = [path for path in folder.iterdir() if path.is_dir() and path.name not in workers]
    return sorted((path for other in others for path in record_files(other)), key=lambda path: path.stat().st_mtime)


def describe(trajectory: Trajectory) -> dict[str, Any]:
    """What an index knows of an episode."""
    task, steps, verdict = trajectory.task, trajectory.steps, trajectory.verdict
    ticket, index, worker, finished_at = trajectory_identity(trajectory)
    return {
        "ticket": ticket,
        "index": index,
        "worker": worker,
        "finished_at": finished_at,
        "task": task.id,
        "source": task.source,
        "site": task.website or task.environment,
        "difficulty": task.difficulty,
        "instruction": trajectory.instruction[:MAX_INSTRUCTION_CHARACTERS],
        "outcome": trajectory.outcome,
        "end_reason": trajectory.end_reason,
        "reason": "" if verdict is None else verdict.reason,
        "reward": trajectory.reward,
        "steps": len(steps),
        "response_tokens": trajectory.response_tokens,
        "format_errors": sum(step.format_error is not None for step in steps),
        "oldest_version": trajectory.oldest_version,
        "newest_version": trajectory.newest_version,
        "seconds": round(trajectory.seconds, 3),
        "tries": trajectory.tries,
    }
