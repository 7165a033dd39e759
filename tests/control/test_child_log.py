"""Logs of child processes: rotated without a lost line, complete at the exit, and read per life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import ChildProcess, start_process
from tests.waiting import until


def child(log: Path, code: str) -> ChildProcess:
    return start_process([sys.executable, "-u", "-c", code], log, os.environ, "child")


def lines(log: Path) -> list[str]:
    """All lines that are kept, oldest first."""
    files = [log.with_name(f"{log.name}.{number}") for number in range(child_process.KEPT_LOGS, 0, -1)] + [log]
    return [line for file in files if file.exists() for line in file.read_text().splitlines()]


def test_a_rotated_log_keeps_every_line_of_a_child_and_of_its_own_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 40_000)
    code = (
        "import os, subprocess, sys\n"
        "inner = 'import os\\nfor n in range(2000): os.write(1, b\"inner %d\\\\n\" % n)'\n"
        "child = subprocess.Popen([sys.executable, '-c', inner])\n"
        "for n in range(6000): os.write(1, b'outer %d\\n' % n)\n"
        "child.wait(); print('the end')"
    )
    log = tmp_path / "logs" / "child.log"
    assert child(log, code).wait(60) == 0
    found = lines(log)
    assert found[-1] == "the end"
    assert [line for line in found if line.startswith("inner")] == [f"inner {n}" for n in range(2000)]
    assert [line for line in found if line.startswith("outer")] == [f"outer {n}" for n in range(6000)]
    assert log.with_name("child.log.1").stat().st_size < 40_000 + 2**16


def test_no_more_than_the_kept_number_of_files_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 1000)
    log = tmp_path / "child.log"
    for life in range(8):
        assert child(log, f"print('{'x' * 1000}'); print('life {life}')").wait(60) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child.log", *(f"child.log.{n}" for n in (1, 2, 3))]
    assert lines(log)[-1] == "life 7"


def test_the_last_line_is_that_of_the_same_life(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    first = child(log, "print('ERROR of the first life'); print('later')")
    first.wait(60)
    second = child(log, "print('all is well')")
    second.wait(60)
    third = child(log, "")
    third.wait(60)
    assert [each.last_line() for each in (first, second, third)] == [
        "ERROR of the first life", "all is well", "none",
    ]  # fmt: skip
    assert log.read_text() == "ERROR of the first life\nlater\nall is well\n"


def test_a_child_runs_on_while_its_log_cannot_be_written_and_the_lost_bytes_are_counted(tmp_path: Path) -> None:
    log, first, second = tmp_path / "child.log", tmp_path / "first", tmp_path / "second"
    code = (
        "import pathlib, time\n"
        f"while not pathlib.Path({str(first)!r}).exists(): time.sleep(0.01)\n"
        "print('lost' * 1000)\n"
        f"while not pathlib.Path({str(second)!r}).exists(): time.sleep(0.01)\n"
        "print('written')"
    )
    process = child(log, code)
    process.log = Path("/dev/full")
    first.touch()
    until(lambda: process._lost == 4001, "the loss of its first line")
    assert process.last_line() == ("lost" * 1000)[:500]
    process.log = log
    second.touch()
    assert process.wait(60) == 0
    assert log.read_text() == "ERROR 4001 bytes of output were lost: the log was not writable\nwritten\n"


def test_a_child_starts_although_its_log_cannot_be_opened_yet(tmp_path: Path) -> None:
    folder, opened = tmp_path / "logs", tmp_path / "opened"
    folder.touch()  # in place of the folder
    code = (
        "import pathlib, time\n"
        "print('lost')\n"
        f"while not pathlib.Path({str(opened)!r}).exists(): time.sleep(0.01)\n"
        "print('written')"
    )
    process = child(folder / "child.log", code)
    until(lambda: process._lost == 5, "the loss of its first line")
    folder.unlink()
    opened.touch()
    assert process.wait(60) == 0
    written = (folder / "child.log").read_text()
    assert written == "ERROR 5 bytes of output were lost: the log was not writable\nwritten\n"


def test_a_child_of_a_dead_child_neither_holds_up_its_parent_nor_the_log(tmp_path: Path) -> None:
    code = "import subprocess, sys\nsubprocess.Popen(['sleep', '60'])\nprint('done')"
    process = child(tmp_path / "log", code)
    assert process.wait(20) == 0
    assert (tmp_path / "log").read_text() == "done\n"
    subprocess.run(["pkill", "-g", str(process.pid)], check=True)
    until(lambda: process._pipe.closed, "the end of the log")
