"""episodes.jsonl: one line for every episode that was trained or dropped.

rolled_back.jsonl: the lines after the checkpoint that a trainer resumed from in its job; the tickets are issued again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_webrl.types import Trajectory
from megatron_webrl.util import history
from megatron_webrl.util.history import History

log = logging.getLogger(__name__)

FILE = "episodes.jsonl"
ROLLED_BACK_FILE = "rolled_back.jsonl"
TRAINED = "trained"


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
    """The line of an episode; docs/summary.md describes the fields."""
    return {
        "ticket": trajectory.ticket,
        "index": trajectory.index,
        "task": trajectory.task.id,
        "environment": trajectory.task.environment,
        "difficulty": trajectory.task.difficulty,
        "outcome": trajectory.outcome,
        "disposition": reason or TRAINED,
        "verdict": _verdict(trajectory),
        "version": version,
        "oldest_version": trajectory.oldest_version,
        "tries": trajectory.tries,
        "worker": trajectory.worker,
        "seconds": round(trajectory.seconds, 4),
        "finished_at": _finished_at(trajectory),
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


def _verdict(trajectory: Trajectory) -> dict[str, Any] | None:
    """Who decided the outcome, why, and at what cost; the stages are in the trajectory."""
    if (verdict := trajectory.verdict) is None:
        return None
    names = ("evaluator", "protocol", "prompts", "reason", "calls", "prompt_tokens", "response_tokens", "dollars")
    return {name: getattr(verdict, name) for name in names} | {"seconds": round(verdict.seconds, 4)}


EpisodeIdentity = tuple[int, int, str, float]  # of one run of an episode: ticket, index, worker's instance id, end time


def line_identity(line: Mapping[str, Any]) -> EpisodeIdentity:
    return line["ticket"], line["index"], line["worker"], line["finished_at"]


def trajectory_identity(trajectory: Trajectory) -> EpisodeIdentity:
    return trajectory.ticket, trajectory.index, trajectory.worker, _finished_at(trajectory)


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


def _finished_at(trajectory: Trajectory) -> float:
    return round(trajectory.finished_at, 3)
