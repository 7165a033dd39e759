"""The journal of the control service: what it restores."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request

from megatron_webrl.control import journal as journals
from megatron_webrl.control.journal import Journal, JournalError, restore
from megatron_webrl.control.server import ControlService
from megatron_webrl.control.state import JobState
from megatron_webrl.util import atomic_file


def write(path: Path, state: JobState, requests: range) -> None:
    async def append() -> None:
        opened = Journal(path)
        for number in requests:
            commands = [["put", f"key/{number % 7}", number], ["add", "sum", number]]
            state.apply("a", number, commands)
            opened.append("a", number, commands, state)
        await asyncio.gather(opened.sync(), opened.sync())
        opened.close()

    asyncio.run(append())


def test_a_journal_restores_the_state_wherever_it_was_cut(tmp_path: Path) -> None:
    path, state = tmp_path / "journal", JobState()
    write(path, state, range(1, 30))
    whole = path.read_bytes()
    state.changed.clear()
    assert restore(path) == state
    lines = whole.splitlines(keepends=True)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        restored = restore(path)
        complete = whole[:end].count(b"\n")
        assert restored.facts.get("sum", 0) == sum(range(1, complete + 1))
        assert path.read_bytes() == b"".join(lines[:complete])  # ready for the next line


def test_a_long_journal_becomes_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "COMPACT_BYTES", 2000)
    path, state = tmp_path / "journal", JobState()
    write(path, state, range(1, 500))
    assert path.stat().st_size < 4000
    state.changed.clear()
    assert restore(path) == state
    write(path, state, range(500, 600))  # opened again
    assert restore(path).facts["sum"] == sum(range(600))
    assert [each.name for each in tmp_path.iterdir()] == ["journal"]


@pytest.mark.parametrize("bytes_before_a_snapshot", [2000, 10**6])
def test_lines_appended_during_a_sync_need_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_before_a_snapshot: int
) -> None:
    monkeypatch.setattr(journals, "COMPACT_BYTES", bytes_before_a_snapshot)
    started, released, synced = threading.Event(), threading.Event(), []

    def sync(descriptor: int, real: Callable[[int], None] = os.fdatasync) -> None:
        size = os.fstat(descriptor).st_size
        started.set()
        assert released.wait(30)
        real(descriptor)
        synced.append(size)

    async def append() -> None:
        opened = Journal(tmp_path / "journal")
        long, short = [["put", "key", "x" * 1900]], [["put", "key", "y"]]
        opened.append("a", 1, long, JobState())
        running = asyncio.create_task(opened.sync())
        await asyncio.to_thread(started.wait, 30)
        opened.append("a", 2, long, JobState())  # becomes a snapshot of an empty state, if one is due
        waiting = asyncio.create_task(opened.sync())
        await asyncio.sleep(0)
        released.set()
        await asyncio.gather(running, waiting)
        if bytes_before_a_snapshot > 2000:
            assert synced[-1] == (tmp_path / "journal").stat().st_size
        opened.append("a", 3, short, JobState())
        await opened.sync()
        assert synced[-1] == (tmp_path / "journal").stat().st_size
        opened.close()

    monkeypatch.setattr(os, "fdatasync", sync)
    asyncio.run(append())


async def test_a_request_is_answered_when_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(atomic_file, "fsync", folders.append)
    service = ControlService(JobState(), Journal(tmp_path / "journal"), "job", 60.0)
    assert folders == [tmp_path]  # a new file's name
    started, released = threading.Event(), threading.Event()

    def sync(descriptor: int) -> None:
        started.set()
        assert released.wait(30)

    monkeypatch.setattr(os, "fdatasync", sync)
    body = {"stream": "a", "number": 1, "commands": [["put", "key", 1]]}
    request = Request({"type": "http"})
    answers = [asyncio.create_task(service.handlers["POST /sync"](body, request)) for _ in range(2)]  # is sent again
    assert await asyncio.to_thread(started.wait, 30)
    assert len((tmp_path / "journal").read_bytes().splitlines()) == 2  # the start of the service, and the request
    await asyncio.sleep(0.05)
    assert not any(answer.done() for answer in answers)
    released.set()
    assert [json.loads(answer)["replies"] for answer in await asyncio.gather(*answers)] == [[None]] * 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for line in (b"[]\n", b"nonsense\n", b'["a", 1, [["explode"]]]\n', b"{}\n"):
        path.unlink(missing_ok=True)
        write(path, JobState(), range(1, 3))
        path.write_bytes(path.read_bytes() + line + b'["a", 3, []]\n')
        with pytest.raises(JournalError, match=f"{path}, line 3: "):
            restore(path)
