"""episodes.jsonl has one line per closed episode, also after resumes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_webrl.track import episodes
from megatron_webrl.track.episodes import EpisodeLog
from tests.trajectories import trajectory


def dispositions(folder: Path) -> list[tuple[int, int, str, int]]:
    return [
        (line["ticket"], line["index"], line["disposition"], line["version"]) for line in episodes.read_lines(folder)
    ]


def test_every_episode_is_a_line_with_its_steps(tmp_path: Path):
    assert episodes.read_lines(tmp_path) == []
    written = EpisodeLog(tmp_path, 0)
    written.add(trajectory(3, 1, steps=2, prompt=7, response=4, version=5), None, 6)
    [line] = episodes.read_lines(tmp_path)  # while it is open
    assert (line["disposition"], line["version"], line["oldest_version"], line["outcome"]) == (
        "trained",
        6,
        5,
        "failure",
    )
    assert [(step["prompt_tokens"], step["cached_tokens"], step["response_tokens"]) for step in line["steps"]] == [
        (7, 0, 4)
    ] * 2
    written.add(trajectory(4, 0, reward=1.0), "all_succeeded", 7)
    written.close()
    written.close()
    assert dispositions(tmp_path) == [(3, 1, "trained", 6), (4, 0, "all_succeeded", 7)]


def test_a_resume_deletes_the_lines_after_its_checkpoint(tmp_path: Path):
    first = EpisodeLog(tmp_path, 0)
    for ticket in range(4):
        first.add(trajectory(ticket), None, ticket)
    first.close()
    second = EpisodeLog(tmp_path, 2)
    assert dispositions(tmp_path) == [(0, 0, "trained", 0), (1, 0, "trained", 1)]
    second.add(trajectory(2), "stale", 9)
    second.close()
    assert dispositions(tmp_path)[2:] == [(2, 0, "stale", 9)]
    EpisodeLog(tmp_path, 0).close()  # another run
    assert dispositions(tmp_path) == []


def test_missing_lines_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        EpisodeLog(tmp_path, 5).close()
    assert "episodes.jsonl has 0 lines of the 5 episodes before the resume" in caplog.text
