"""Files that are replaced whole or not at all, by real processes that are killed, lose power or find the disk full."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from itertools import product
from pathlib import Path

import pytest

from megatron_webrl.ring.record import RecordFileWriter
from megatron_webrl.util import atomic_file
from tests.file_faults import FileFaults, file_size_limit, run_forked
from tests.waiting import run_apart


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["state.json", "ä" * 120])
def test_a_file_is_replaced_and_nothing_else_is_left(name: str, tmp_path: Path):
    path = tmp_path / name
    atomic_file.write_json(path, {"version": 1})
    with atomic_file.replacing(path, 0o600) as file:
        (temporary,) = set(tmp_path.iterdir()) - {path}
        assert temporary.stat().st_mode & 0o777 == 0o600  # from its first moment
        file.write(b"ours")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("ours", 0o600)
    assert names(tmp_path) == {name}


@pytest.mark.parametrize("limit", [1000, 2**30])
def test_a_failed_write_keeps_the_old_content(limit: int, tmp_path: Path):
    path = tmp_path / "state"
    atomic_file.write_text(path, "old")

    def write() -> None:
        with atomic_file.replacing(path) as file:
            file.write(b"x" * 2000)
            file.flush()
            raise KeyError("no")

    with file_size_limit(limit), pytest.raises((OSError, KeyError), match=r"File too large|no"):
        write()
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
    def killed() -> None:
        with atomic_file.replacing(tmp_path / "state"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(killed) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / "data.writing").write_text("a file of another kind")
    assert atomic_file.remove_leftovers(tmp_path) == []
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert atomic_file.remove_leftovers(tmp_path) == [left.name]
    assert names(tmp_path) == {"data.writing"}


def write_records(path: Path, content: bytes) -> None:
    with RecordFileWriter(path) as file:
        file.write([content])


def lose_power(kind: str) -> None:
    write = {"file": atomic_file.write_bytes, "records": write_records}[kind]
    for at, seed in product(range(1, 20), range(4)):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # an fsync takes no time there
            folder, old, new = Path(memory, "folder"), Path(memory, "old"), Path(memory, "new")
            folder.mkdir()
            for path, content in ((old, b"old"), (new, b"new" * 1000), (folder / "state", b"old")):
                write(path, content)

            def crash(folder: Path = folder, at: int = at, seed: int = seed) -> None:
                with FileFaults(folder, at, power_loss=True, seed=seed) as faults:
                    write(folder / "state", b"new" * 1000)
                    (folder.parent / "returned").touch()
                    faults.crash()

            assert run_forked(crash) == -signal.SIGKILL
            done, content = Path(memory, "returned").exists(), (folder / "state").read_bytes()
            assert content == new.read_bytes() if done else content in (old.read_bytes(), new.read_bytes())
        if done and seed == 3:
            break
    assert 3 < at < 19


@pytest.mark.parametrize("kind", ["file", "records"])
def test_a_power_failure_leaves_all_or_nothing_and_after_the_return_all(kind: str):
    """Content is on disk before the name, and the name before the return."""
    run_apart(lose_power, kind)
