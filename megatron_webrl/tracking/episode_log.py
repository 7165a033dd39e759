"""episodes.jsonl: the accounting of a run, itemised. A line for every episode that was trained or dropped.

rolled_back.jsonl has the lines of episodes that were counted after the checkpoint from which the trainer was started
again within its job: their records are gone, and their tickets are run again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

FILE = "episodes.jsonl"
ROLLED_BACK = "rolled_back.jsonl"
TRAINED = "trained"


class EpisodeLog:
    """Lines are written as episodes are counted. The file has as many as the accounting has closed episodes."""

    def __init__(self, folder: Path, closed: int) -> None:
        """`closed`: how many lines of a run that goes on from a checkpoint hold; what came after is done again."""
        path = folder / FILE
        lines: list[str] = []
        if closed:
            if path.is_file():
                with path.open() as file:
                    lines = list(islice(file, closed))
            if len(lines) < closed:
                log.warning("%s has %d lines of the %d episodes before the resume", path, len(lines), closed)
        temporary = path.with_name(f".{FILE}")
        temporary.write_text("".join(lines))
        temporary.rename(path)
        self._file = path.open("a", buffering=1)  # line by line: whoever follows it sees whole ones

    def add(self, trajectory: Trajectory, reason: str | None, version: int) -> None:
        """An episode was trained, or dropped for a reason, at the trainer's `version`."""
        self._file.write(json.dumps(episode_line(trajectory, reason, version)) + "\n")

    def close(self) -> None:
        """No more lines. A second call does nothing."""
        self._file.close()


def episode_line(trajectory: Trajectory, reason: str | None, version: int) -> dict[str, Any]:
    """What is told of an episode; docs/summary.md describes the fields."""
    return {
        "ticket": trajectory.ticket,
        "index": trajectory.index,
        "task": trajectory.task.id,
        "environment": trajectory.task.environment,
        "difficulty": trajectory.task.difficulty,
        "outcome": trajectory.outcome,
        "disposition": reason or TRAINED,
        "version": version,
        "oldest_version": trajectory.oldest_version,
        "tries": trajectory.tries,
        "worker": trajectory.worker,
        "seconds": round(trajectory.seconds, 4),
        "finished_at": _moment(trajectory),
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


EpisodeIdentity = tuple[int, int, str, float]
"""Of one run of an episode: its ticket, its index, the life of its worker, and when it ended."""


def line_identity(line: Mapping[str, Any]) -> EpisodeIdentity:
    """Of the episode that a line tells of."""
    return line["ticket"], line["index"], line["worker"], line["finished_at"]


def trajectory_identity(trajectory: Trajectory) -> EpisodeIdentity:
    """The same of a trajectory."""
    return trajectory.ticket, trajectory.index, trajectory.worker, _moment(trajectory)


def read_lines(folder: Path, first: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run, from `first` on to before `end`; none without a file."""
    return _lines(folder / FILE, first, end)


def read_rolled_back(folder: Path) -> list[dict[str, Any]]:
    """The lines that were put aside in the job."""
    return _lines(folder / ROLLED_BACK)


def roll_back(folder: Path, closed: int, present: Container[EpisodeIdentity]) -> list[dict[str, Any]]:
    """Put the lines aside that follow the first `closed` ones, and whose episodes are not `there` to be counted again.

    Returns all that were put aside in the job. A second call, after a crash, changes nothing.
    """
    lost = read_rolled_back(folder)
    known = {line_identity(line) for line in lost}
    lost += [
        line
        for line in read_lines(folder, closed)
        if line_identity(line) not in known and line_identity(line) not in present
    ]
    temporary = folder / f".{ROLLED_BACK}"
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lost))
    temporary.rename(folder / ROLLED_BACK)
    return lost


def clear_rolled_back(folder: Path) -> None:
    """Another job begins, which knows nothing of what was rolled back before."""
    (folder / ROLLED_BACK).unlink(missing_ok=True)


def _moment(trajectory: Trajectory) -> float:
    return round(trajectory.finished_at, 3)


def _lines(path: Path, first: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open() as file:
        return [json.loads(text) for text in islice(file, first, end)]
