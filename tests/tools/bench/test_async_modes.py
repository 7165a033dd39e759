"""The benchmark of modes: what it reads from a run, and, at length, the jobs themselves."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_webrl.launch.validation import load_config
from megatron_webrl.track import summary
from megatron_webrl.track.episodes import EpisodeLog
from tests.trajectories import trajectory

bench: Any = importlib.import_module("tools.bench.async_modes")  # a keyword of Python


def a_run(folder: Path, matches: bool = True) -> Path:
    """Three updates, 10 s apart, of 2, 3 and 4 trajectories; one more is dropped."""
    log, trained = EpisodeLog(folder, 0), [2, 3, 4]
    for version, count in enumerate(trained):
        for index in range(count):
            log.add(trajectory(version, index), None, version)
    log.add(trajectory(9, 0), "stale", 2)
    log.close()
    seconds = {"rollout": 8.0, "train": 3.0, "sync": 1.0, "wait": 5.0}
    extra = {"engine/idle_fraction": 0.25, "wasted_token_fraction": 0.1}
    updates = [
        {"version": n + 1, "seconds": seconds, "finished_at": 1000.0 + 10 * n, "staleness_mean": n, "extra": extra}
        for n in range(3)
    ]
    summary.open_updates(folder).append(*updates)
    accounting = {"finished": 10, "trained": 9, "dropped": {"stale": 1}, "waiting": 0, "matches": matches}
    (folder / "summary.json").write_text(json.dumps({"accounting": accounting}))
    return folder


def test_what_comes_after_the_first_update_is_counted(tmp_path: Path):
    found = bench.figures("async", a_run(tmp_path))
    assert (found.seconds, found.trajectories, found.per_hour) == (20.0, 7, 7 * 180)
    assert (found.waiting, found.training, found.syncing) == (0.5, 0.3, 0.1)
    assert (found.idle, found.wasted, found.staleness) == (0.25, 0.1, 1.5)
    assert found.curve == ((0.0, 0), (10.0, 3), (20.0, 7))
    xml.etree.ElementTree.fromstring(bench.draw([found]))


def test_a_run_whose_accounting_does_not_match_gives_no_figures(tmp_path: Path):
    with pytest.raises(RuntimeError, match="does not match"):
        bench.figures("async", a_run(tmp_path, matches=False))


def test_all_jobs_are_valid(tmp_path: Path, tiny_model: Path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(bench.configuration(tmp_path, bench.FULL, bench.ENVIRONMENTS)))
    staleness = [
        load_config(config, [f"model.path={tiny_model}", *job]).staleness_limit for job in bench.CONTESTANTS.values()
    ]
    assert staleness == [2, 1, 0, 0]


@pytest.mark.soak
def test_the_jobs_run(tmp_path: Path):
    words = [sys.executable, "-m", "tools.bench.async_modes", "--quick", "--json", str(tmp_path / "figures.json")]
    subprocess.run(words, check=True, timeout=2400)
    jobs = json.loads((tmp_path / "figures.json").read_text())["jobs"]
    assert [job["name"] for job in jobs] == list(bench.CONTESTANTS)
    assert all(job["trajectories"] > 0 for job in jobs)
