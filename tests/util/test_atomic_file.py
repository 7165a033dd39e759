"""Files that are replaced whole or not at all, by real processes that are killed or find the disk full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_webrl.util import atomic_file
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path):
    path = tmp_path / "state.json"
    atomic_file.write_json(path, {"version": 1})
    atomic_file.write_json(path, {"version": 2})
    assert path.read_text() == '{"version": 2}\n'
    assert names(tmp_path) == {"state.json"}


def test_a_file_can_be_for_its_owner_only_from_its_first_moment(tmp_path: Path):
    path = tmp_path / "token"
    with atomic_file.replacing(path, 0o600) as file:
        (temporary,) = tmp_path.iterdir()
        assert temporary.stat().st_mode & 0o777 == 0o600
        file.write(b"secret")
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_exception_while_writing_keeps_the_old_content(tmp_path: Path):
    path = tmp_path / "state"
    atomic_file.write_text(path, "old")

    def fail() -> None:
        with atomic_file.replacing(path) as file:
            file.write(b"new")
            raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == {"state"}


def test_a_file_that_does_not_fit_keeps_the_old_content(tmp_path: Path):
    path = tmp_path / "state"
    atomic_file.write_text(path, "old")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            atomic_file.write_bytes(path, b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "old"
    assert names(tmp_path) == {"state"}


def test_writers_at_once_leave_the_content_of_one_of_them(tmp_path: Path):
    path, contents = tmp_path / "state", [bytes([number]) * 100_000 for number in range(8)]

    def write(content: bytes) -> None:
        for _ in range(20):
            atomic_file.write_bytes(path, content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or path.read_bytes() in contents
    assert path.read_bytes() in contents
    assert names(tmp_path) == {"state"}


def test_the_temporary_file_of_a_killed_process_is_removed_an_hour_after_its_last_write(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from megatron_webrl.util import atomic_file\n"
        "with atomic_file.replacing(Path(sys.argv[1])): time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "state")], cwd=ROOT)
    until(lambda: len(names(tmp_path)) == 1, "a temporary file")
    child.kill()
    child.wait()
    (left,) = tmp_path.iterdir()
    (tmp_path / "data.writing").write_text("a file of another kind")
    assert atomic_file.remove_leftovers(tmp_path) == []
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert atomic_file.remove_leftovers(tmp_path) == [left.name]
    assert names(tmp_path) == {"data.writing"}


def test_content_is_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps, fsync, replace = [], os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("sync of the folder" if path == tmp_path else f"sync of {path.stat().st_size} bytes")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", lambda path, other: (steps.append("rename"), replace(path, other)))
    atomic_file.write_bytes(tmp_path / "state", b"x" * 1000)
    assert steps == ["sync of 1000 bytes", "rename", "sync of the folder"]


def test_a_long_name_leaves_room_for_the_suffix(tmp_path: Path):
    path = tmp_path / ("ä" * 120)
    atomic_file.write_text(path, "content")
    assert path.read_text() == "content"
