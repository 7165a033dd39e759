"""The rollouts of a pool, as a viewer sees them through the control service and the files of the run."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_webrl.control.connection import Connection
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.track.live_rollouts import CHANGING, FIXED, STATES, running_file


async def check_waiting_rollouts(
    address: Path, run_folder: Path, until: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    """Of two rollouts one waits for the model, the other for the step; without viewers nothing is reported."""
    viewer = Connection(address, "viewer")

    def rows(*episodes: str) -> dict[str, dict[str, Any]]:
        workers = viewer.rollouts(episodes)["workers"]
        found = json.loads(workers["rollout-0"][1])[1] if workers else []
        return {row[0]: dict(zip(FIXED + CHANGING, row, strict=True)) for row in found}

    assert not rows()
    await until(rows)
    found = {key: STATES[row["state"]] for key, row in rows().items()}
    assert sorted(found) == ["training-0-0", "training-0-1"]
    assert sorted(found.values()) == ["waiting for model", "waiting for step"]
    assert {(row["step"], row["limit"], row["tries"], row["version"]) for row in rows().values()} == {(0, 3, 1, None)}
    path = running_file(run_folder, "rollout-0", "training-0-1")
    await until(lambda: (rows("rollout-0/training-0-1"), path.is_file())[1])
    episode = decode_trajectory(next(read_record_file(path)))
    assert (episode.index, episode.steps, len(episode.images), episode.end_reason) == (1, (), 1, "")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
