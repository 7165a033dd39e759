"""Files of runs, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_webrl.track import summary
from megatron_webrl.track.episodes import EpisodeLog
from tests.trajectories import trajectory


@dataclass(frozen=True)
class Timed:
    """What an episode of a written run took; seconds."""

    generations: Sequence[float]
    browsers: Sequence[float]
    ended: float
    seconds: float


def write_episode(
    log: EpisodeLog, ticket: int, index: int, timed: Timed, version: int, *, reward: float = 0.0,
    oldest: int | None = None, reason: str | None = None, responses: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """`version`: the trainer's when the episode was closed."""
    made = trajectory(
        ticket, index, reward=reward, version=version if oldest is None else oldest, steps=len(timed.generations)
    )
    steps = []
    for number, step in enumerate(made.steps):
        length = len(step.response_token_ids) if responses is None else responses[number]
        steps.append(
            replace(
                step, seconds_generation=timed.generations[number], seconds_browser=timed.browsers[number],
                response_token_ids=np.zeros(length, np.int32),
            )
        )  # fmt: skip
    log.add(replace(made, steps=tuple(steps), seconds=timed.seconds, finished_at=timed.ended), reason, version)


def write_run(folder: Path, updates: list[dict[str, Any]], config: dict[str, Any] | None = None) -> None:
    folder.mkdir(exist_ok=True)
    rollout = {"mode": "sync", "group_size": 2, "groups_in_flight": 4}
    trainer = {"groups_per_update": 2, "zero_variance_groups": "drop"}
    content: dict[str, Any] = {"run": {"name": folder.name}, "rollout": rollout, "trainer": trainer}
    for section, values in (config or {}).items():
        content.setdefault(section, {}).update(values)
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    summary.open_updates(folder).append(*updates)


def update(version: int, at: float, *, wait: float, train: float, sync: float, pause: float) -> dict[str, Any]:
    seconds = {"rollout": 0.0, "train": train, "sync": sync, "wait": wait}
    return {"version": version, "seconds": seconds, "finished_at": at, "extra": {"weights/pause_seconds": pause}}
