"""episodes.jsonl: the accounting of a run, itemised. A line for every episode that was trained or dropped."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

FILE = "episodes.jsonl"
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
        self._file.write(json.dumps(line(trajectory, reason, version)) + "\n")

    def close(self) -> None:
        """No more lines. A second call does nothing."""
        self._file.close()


def line(trajectory: Trajectory, reason: str | None, version: int) -> dict[str, Any]:
    """What is told of an episode; docs/summary.md describes the fields."""
    return {
        "ticket": trajectory.ticket,
        "index": trajectory.index,
        "task": trajectory.task.id,
        "environment": trajectory.task.environment,
        "difficulty": trajectory.task.difficulty,
        "outcome": trajectory.outcome,
        "fate": reason or TRAINED,
        "version": version,
        "oldest_version": trajectory.oldest_version,
        "tries": trajectory.tries,
        "worker": trajectory.worker,
        "seconds": round(trajectory.seconds, 4),
        "finished_at": round(trajectory.finished_at, 3),
        "steps": [
            {
                "prompt": len(step.prompt_token_ids),
                "cached": step.prompt_cached,
                "response": len(step.response_token_ids),
                "generation": round(step.seconds_generation, 4),
                "browser": round(step.seconds_browser, 4),
            }
            for step in trajectory.steps
        ],
    }


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run; none without a file."""
    path = folder / FILE
    return [json.loads(text) for text in path.read_text().splitlines()] if path.is_file() else []
