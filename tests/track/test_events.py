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


def test_an_event_has_role_host_and_reason_and_a_run_has_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert events_of_last_job(read_events(tmp_path)) == []
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    event_log = EventLog(tmp_path, 3)
    for outcome in ("stopped", "finished"):
        event_log.add(events.JOB, events.STARTED, log=Path("/elsewhere/b.log"))
        event_log.add("rollout-7", events.RESTARTED, "by SIGKILL", tmp_path / "logs" / "node-3" / "rollout-7.log")
        event_log.add(events.JOB, events.ENDED, outcome)
    started, restarted, ended = events_of_last_job(read_events(tmp_path))
    assert (restarted.role, restarted.event, restarted.node) == ("rollout-7", "restarted", 3)
    assert (restarted.reason, restarted.log) == ("by SIGKILL", "logs/node-3/rollout-7.log")
    assert (restarted.slurm_job_id, restarted.host) == ("4711", os.uname().nodename)
    assert (started.event, started.log, ended.reason, ended.log) == ("started", "/elsewhere/b.log", "finished", "")


def test_lines_of_concurrent_writers_stay_whole_and_fit_one_write(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(node)]) for node in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = read_events(tmp_path)
    for node in range(3):
        assert [event.role for event in found if event.node == node] == [f"trainer-{n}" for n in range(200)]
    assert len((tmp_path / events.FILE).read_bytes().splitlines()) == 600
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
    other = tmp_path / "other"
    other.mkdir()
    (other / events.FILE).write_text("".join(json.dumps(whole | {"time": at}) + "\n" for at in (2.0, 1.0, 3.0)))
    assert [event.time for event in read_events(other)] == [1.0, 2.0, 3.0]  # of several nodes
    EventLog(tmp_path).add("trainer-1", "started")  # after half a line, which a full disk has left
    assert [event.role for event in read_events(tmp_path)] == ["trainer-0", "trainer-1"]


def test_a_lock_that_is_never_released_delays_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
