"""A job that saves all the time is killed at random moments: the checkpoint that `latest` names always loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forks
from tests.trainer.checkpoint import crash_ranks

KILLS, SEED = 16, 7


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_a_kill_at_any_moment_the_latest_checkpoint_is_complete(tmp_path: Path) -> None:
    context = forks.start(crash_ranks.drive, str(tmp_path), KILLS, SEED, ranks=1)
    try:
        assert context.join(timeout=570), "the job was not killed and started often enough within its limit"
    finally:
        context.processes[0].kill()
    rounds = json.loads((tmp_path / "rounds.json").read_text())
    assert len(rounds) == KILLS + 1
    versions = []
    for number, found in enumerate(rounds):
        one, two = found["ranks"]
        assert one == two
        assert one["swept"]
        if one["version"]:
            assert one["values"] == [one["version"]], f"round {number} mixes versions"
        versions.append(one["version"])
    assert versions == sorted(versions)
    # Kills hit saves in progress, and the job made progress between them.
    assert sum(any(name.isdigit() for name in found["left"]) for found in rounds) >= 5
    assert versions[-1] > crash_ranks.SAVES
