"""A trainer that dies repeatedly within one job, with a real ring and control service."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from megatron_webrl.track import episodes, summary
from tests.gloo import spawn
from tests.metrics_page import undocumented
from tests.trainer.checkpoint import restart_ranks as ranks


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_job_whose_trainer_dies_loses_no_group_and_trains_none_twice(tmp_path: Path, seed: int) -> None:
    spawn(ranks.run, str(tmp_path), seed, ranks=1, seconds=300)
    attempts = json.loads((tmp_path / "found.json").read_text())
    run = ranks.config_of(str(tmp_path)).run_folder
    accounting, lines = summary.read_summary(run)["accounting"], episodes.read_lines(run)
    assert accounting["matches"], accounting
    assert accounting["trained"] == 2 * ranks.GROUPS * ranks.UPDATES
    assert accounting["rolled_back"] == attempts[-1]["rolled_back"] == len(episodes.read_rolled_back(run)) > 0
    assert sum(attempt["surviving"] for attempt in attempts) > 0
    assert sum(attempt["reissued"] for attempt in attempts) > 0

    assert max(Counter((line["ticket"], line["index"]) for line in lines).values()) == 1
    trained: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        if line["disposition"] == episodes.TRAINED:
            trained[line["version"]].add(line["ticket"])
    found = {version: len(tickets) for version, tickets in trained.items()}
    assert found == dict.fromkeys(range(ranks.UPDATES), ranks.GROUPS)
    closed = {line["ticket"] for line in lines}
    assert len(set(range(max(closed) + 1)) - closed) <= (ranks.AHEAD + 1) * ranks.GROUPS
    updates = summary.read_updates(run)
    assert [update["version"] for update in updates] == list(range(1, ranks.UPDATES + 1))
    assert undocumented({name for update in updates for name in update["extra"]}) == []
    assert all(0 <= update["staleness_mean"] <= ranks.AHEAD for update in updates)
