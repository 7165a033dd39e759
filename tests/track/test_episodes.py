"""The episodes of a run: a line for each also after resumes, and stored ones, of which the oldest are deleted."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import decode_trajectory, read_record
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.track import episodes
from megatron_webrl.track.episodes import FOLDER, INDEX_FILE, EpisodeLog, EpisodeStore, record_files
from megatron_webrl.util import history
from tests.file_faults import file_size_limit
from tests.trajectories import screenshot, trajectory

MIB = 2**20
SIZE = len(screenshot(0))


def dispositions(folder: Path) -> list[tuple[int, int, str, int]]:
    return [
        (line["ticket"], line["index"], line["disposition"], line["version"]) for line in episodes.read_lines(folder)
    ]


def test_every_episode_is_a_line_until_a_resume_deletes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert episodes.read_lines(tmp_path) == []
    first = EpisodeLog(tmp_path, 0)
    first.add(trajectory(0, 1, steps=2, prompt=7, response=4, version=5), None, 6)
    [line] = episodes.read_lines(tmp_path)  # while it is open
    assert (line["oldest_version"], line["outcome"]) == (5, "failure")
    tokens = [(step["prompt_tokens"], step["cached_tokens"], step["response_tokens"]) for step in line["steps"]]
    assert tokens == [(7, 0, 4)] * 2
    for ticket in (1, 2):
        first.add(trajectory(ticket, reward=1.0), "all_succeeded", 7)
    first.close()
    first.close()
    second = EpisodeLog(tmp_path, 2)
    second.add(trajectory(3), "stale", 9)
    second.close()
    assert dispositions(tmp_path) == [(0, 1, "trained", 6), (1, 0, "all_succeeded", 7), (3, 0, "stale", 9)]
    EpisodeLog(tmp_path, 0).close()  # another run
    assert dispositions(tmp_path) == []
    with caplog.at_level(logging.WARNING):
        EpisodeLog(tmp_path, 5).close()
    assert "episodes.jsonl has 0 lines of the 5 episodes before the resume" in caplog.text


def group(ticket: int, size: int = 2):
    return [replace(trajectory(ticket, index), images=(screenshot(ticket),)) for index in range(size)]


def test_an_episode_is_read_back_by_its_line_of_the_index_and_at_no_other_position(tmp_path: Path):
    store = EpisodeStore(tmp_path, MIB)
    for ticket in range(3):
        store.add(group(ticket))
    store.add([replace(trajectory(7), outcome="browser_error", steps=())], kind="after")
    lines = list(history.read(tmp_path / INDEX_FILE))
    assert [(line["ticket"], line["index"], line["kind"]) for line in lines] == [
        *((ticket, index, "training") for ticket in range(3) for index in range(2)), (7, 0, "after"),
    ]  # fmt: skip
    for line, wanted in zip(lines, [*group(0), *group(1), *group(2)], strict=False):
        found = decode_trajectory(read_record(tmp_path / line["file"], line["position"]))
        assert (found.ticket, found.index) == (wanted.ticket, wanted.index)
        assert [bytes(image) for image in found.images] == list(wanted.images)
        assert np.array_equal(found.steps[0].logprobs, wanted.steps[0].logprobs)
    assert (lines[-1]["outcome"], lines[-1]["oldest_version"]) == ("browser_error", None)
    path = record_files(tmp_path)[0]
    for position in (3, 17, path.stat().st_size - 4, path.stat().st_size + 100):
        with pytest.raises(RecordError, match=path.name):
            read_record(path, position)


def test_episodes_of_several_threads_are_stored_once_each(tmp_path: Path):
    store, interval = EpisodeStore(tmp_path, 64 * MIB), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(store.add, [[trajectory(ticket)] for ticket in range(60)]))
    finally:
        sys.setswitchinterval(interval)
    lines = list(history.read(tmp_path / INDEX_FILE))
    assert sorted(line["ticket"] for line in lines) == list(range(60))
    for line in lines:
        found = decode_trajectory(read_record(tmp_path / line["file"], line["position"]))
        assert found.ticket == line["ticket"]


def test_a_restarted_worker_continues_its_numbers_and_counts_what_is_there(tmp_path: Path):
    first = EpisodeStore(tmp_path, MIB)
    first.add(group(0))
    first.close()
    first.add(group(1))
    assert len(record_files(tmp_path)) == 1, "a closed store takes nothing"
    with (tmp_path / INDEX_FILE).open("a") as file:
        file.write('{"half a li')  # of a worker that was killed
    second = EpisodeStore(tmp_path, 3 * 2 * SIZE)
    for ticket in range(2, 6):
        second.add(group(ticket))
    assert [path.name for path in record_files(tmp_path)] == ["00000004.records", "00000005.records"]
    assert [line["ticket"] for line in history.read(tmp_path / INDEX_FILE)] == [0, 0, 2, 2, 3, 3, 4, 4, 5, 5]


def test_files_of_workers_that_a_resumed_run_no_longer_has_count_and_are_deleted_first(tmp_path: Path):
    config = Config()
    config.run.directory, config.rollout.engines = str(tmp_path), 3
    config.tracking.episodes_gib = 0.0
    EpisodeStore.of_worker(config, "rollout-0").add(group(0))
    assert not list(tmp_path.iterdir()), "without space nothing is stored"
    config.tracking.episodes_gib = 3 * 4 * SIZE / 2**30
    for worker in config.worker_names:
        EpisodeStore.of_worker(config, worker).add(group(0, 3))
    folders = [config.run_folder / FOLDER / worker for worker in config.worker_names]
    config.rollout.engines = 1
    store = EpisodeStore.of_worker(config, "rollout-0")
    store.add(group(1, 3))
    assert [len(record_files(folder)) for folder in folders] == [2, 0, 1]
    store.add(group(2, 3))
    assert [path.name for path in record_files(folders[0])] == [f"{number:08d}.records" for number in (1, 2, 3)]
    assert not record_files(folders[2])


def test_a_disk_that_takes_no_more_costs_episodes_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = EpisodeStore(tmp_path / "full", MIB)
    with file_size_limit(1000):
        store.add(group(0))
    assert not record_files(store.folder)
    assert "cannot be written" in caplog.text
    store.add(group(1))
    assert [line["ticket"] for line in history.read(store.folder / INDEX_FILE)] == [1, 1]
