"""The recorder of a process's timeline."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.track import timeline as recorder
from megatron_webrl.track.timeline import OFF, Timeline, TimelineFiles, Track, open_timeline
from megatron_webrl.util.clock import clock_identity


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.directory, config.tracking.timeline = str(tmp_path), True
    return config


def test_a_span_measures_itself_whether_it_is_recorded_or_not() -> None:
    for timeline in (Timeline(), Timeline(recording=True)):
        before = time.monotonic()
        with timeline.span("train", "loop", version=3) as span:
            span.facts["tokens"] = 7
            while time.monotonic() < span.started + 0.001:
                pass
        after = time.monotonic()
        assert 0.001 <= span.seconds <= after - before
        recorded = timeline.take()
        if not timeline.recording:
            assert not recorded
            continue
        ((name, track, start, end, facts),) = recorded
        assert (name, track, facts) == ("train", "loop", {"version": 3, "tokens": 7})
        assert end - start == pytest.approx(1e6 * span.seconds, abs=1)
        assert before * 1e6 - 1 <= start <= end <= after * 1e6 + 1
        with pytest.raises(ValueError, match="broken"), timeline.span("act"):
            raise ValueError("broken")
        assert [span[0] for span in timeline.take()] == ["act"]
        assert not timeline.take()


def test_a_track_records_one_state_after_the_other_and_none_that_is_empty() -> None:
    timeline = Timeline(recording=True)
    track = Track(timeline, "worker")
    for state in ("", "wait for weights", "wait for weights", "wait for tickets", "", ""):
        track.switch(state)
    first, second = timeline.take()
    assert (first[0], second[0]) == ("wait for weights", "wait for tickets")
    assert first[3] == second[2]


def test_a_process_leaves_the_spans_of_its_threads_and_its_clocks(config: Config) -> None:
    def work(timeline: Timeline) -> None:
        for _ in range(2000):
            with timeline.span("ticket"):
                pass

    for _ in range(2):  # the role is restarted
        with open_timeline(config, "rollout-1", 3) as timeline:
            threads = [threading.Thread(target=work, args=(timeline,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    paths = sorted((config.run_folder / recorder.FOLDER).iterdir())
    assert [path.name for path in paths] == ["rollout-1.0.jsonl", "rollout-1.1.jsonl"]
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert (lines[0]["role"], lines[0]["node"], lines[0]["clock"]) == ("rollout-1", 3, clock_identity())
        assert lines[0]["unix"] - lines[0]["monotonic"] == pytest.approx(time.time() - time.monotonic(), abs=1.0)
        assert [span[0] for line in lines for span in line.get("spans", ())] == ["ticket"] * 6000
    config.run.name, config.tracking.timeline = "off", False
    count = threading.active_count()
    with open_timeline(config, "trainer-0", 0) as timeline:
        assert (timeline is OFF, threading.active_count()) == (True, count)
    assert not config.run_folder.exists()


def test_the_files_of_a_process_keep_the_newest_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FILE_BYTES", 2000)
    timeline = Timeline(recording=True)
    files = TimelineFiles(tmp_path, "trainer-0", 0, timeline)
    (tmp_path / "trainer-1.0.jsonl").touch()  # another role's files are left alone
    for number in range(500):
        timeline.record("step", number, number + 0.5, step=number)
        files.write()
    mine = sorted(tmp_path.glob("trainer-0.*"), reverse=True)
    assert len(mine) == recorder.FILES
    assert sum(path.stat().st_size for path in mine) <= recorder.FILES * 2500
    kept = [span[4]["step"] for path in mine for line in map(json.loads, path.open()) for span in line.get("spans", ())]
    assert kept == list(range(500 - len(kept), 500))
    assert len(list(tmp_path.glob("trainer-1.*"))) == 1


def test_a_disk_that_stalls_costs_the_oldest_spans_and_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "UNWRITTEN_SPANS", 100)
    timeline = Timeline(recording=True)
    for number in range(300):
        timeline.record("step", number, number + 0.5, step=number)
    assert [span[4]["step"] for span in timeline.take()] == list(range(200, 300))


def test_a_disk_that_fails_or_stalls_ends_the_recording_and_not_the_process(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stalled = threading.Event()
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.2)
    with monkeypatch.context() as patched, open_timeline(config, "trainer-0", 0) as timeline:
        patched.setattr(TimelineFiles, "write", lambda *_: stalled.wait(60))
        timeline.record("step", 0.0, 1.0)
    assert "the timeline lacks its end" in caplog.text
    stalled.set()
    timeline = Timeline(recording=True)
    files = TimelineFiles(tmp_path, "trainer-0", 0, timeline)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", fail)
    timeline.record("step", 0.0, 1.0)
    files.write()
    assert not timeline.recording
    timeline.record("step", 1.0, 2.0)
    assert not timeline.take()
