"""events.jsonl: concurrent writers, broken lines, locks."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog, ProcessEvent, events_of_last_job, read_events
from megatron_webrl.util import history

WRITER = """
import sys
from pathlib import Path
from megatron_webrl.track.events import EventLog
event_log = EventLog(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(200):
    event_log.add(f"trainer-{number}", "restarted", "x" * (number * 17 % 900))
"""


def test_an_event_has_role_host_time_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    event_log = EventLog(tmp_path, 3)
    event_log.add("rollout-7", events.RESTARTED, "killed by SIGKILL", tmp_path / "logs" / "node-3" / "rollout-7.log")
    event_log.add("a", events.STARTED)
    event_log.add("b", events.STARTED, log=Path("/elsewhere/b.log"))
    restarted, first, second = read_events(tmp_path)
    assert (restarted.role, restarted.event, restarted.node) == ("rollout-7", "restarted", 3)
    assert restarted.reason == "killed by SIGKILL"
    assert restarted.log == "logs/node-3/rollout-7.log"
    assert restarted.slurm_job_id == "4711"
    assert restarted.host == os.uname().nodename
    assert (first.role, first.log, second.log) == ("a", "", "/elsewhere/b.log")


def test_lines_of_concurrent_writers_stay_whole(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(node)]) for node in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    found = read_events(tmp_path)
    for node in range(4):
        assert [event.role for event in found if event.node == node] == [f"trainer-{n}" for n in range(200)]
    assert len((tmp_path / events.FILE).read_bytes().splitlines()) == 800


def test_a_line_is_never_longer_than_the_limit_of_one_write() -> None:
    for reason in ("x" * 10_000, "ü" * 10_000, '"' * 10_000, "\n" * 10_000):
        line = ProcessEvent(1.0, "trainer-0", "failed", reason=reason).to_json_line()
        assert len(line) <= events.MAX_LINE_BYTES
        assert line.count(b"\n") == 1
        assert reason.startswith(json.loads(line)["reason"])


def test_broken_lines_are_skipped_and_unknown_fields_ignored(tmp_path: Path) -> None:
    path = tmp_path / events.FILE
    whole = {"time": 2.0, "role": "trainer-0", "event": "hung", "stack": "of a later version"}
    path.write_text(
        f'{json.dumps(whole)}\n[1]\n\n{{"time": "x", "role": "a", "event": "b"}}\n{{"time": 1.0, "role": "tr'
    )
    assert [(event.time, event.event) for event in read_events(tmp_path)] == [(2.0, "hung")]
    EventLog(tmp_path).add("trainer-1", "started")  # after half a line, which a full disk has left
    assert [event.role for event in read_events(tmp_path)] == ["trainer-0", "trainer-1"]


def test_without_a_file_there_are_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    assert events_of_last_job([]) == []


def test_a_lock_that_is_never_released_delays_a_supervisor_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LOCK_TIMEOUT_SECONDS", 0.2)
    holder = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / events.FILE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (tmp_path / events.FILE).open("ab") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        EventLog(tmp_path).add("trainer-0", "started")
    finally:
        process.kill()
        process.communicate()
    assert [event.role for event in read_events(tmp_path)] == ["trainer-0"]


def test_a_missing_folder_is_logged_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    EventLog(tmp_path / "gone").add("trainer-0", "failed")
    assert "events.jsonl (trainer-0 failed)" in caplog.text


def test_a_run_that_was_resumed_has_several_jobs(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path)
    for outcome in ("stopped", "finished"):
        event_log.add(events.JOB, events.STARTED)
        event_log.add("trainer-0", events.STARTED)
        event_log.add(events.JOB, events.ENDED, outcome)
    last = events_of_last_job(read_events(tmp_path))
    assert [(event.role, event.event) for event in last] == [
        ("job", "started"), ("trainer-0", "started"), ("job", "ended"),
    ]  # fmt: skip
    assert last[-1].reason == "finished"
