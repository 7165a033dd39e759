"""Histories that grow, are cut back and are followed, with what kills and full disks leave of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from megatron_webrl.util import history
from megatron_webrl.util.history import History, Tail
from tests.file_faults import file_size_limit


def numbers(path: Path) -> list[int]:
    return [line["n"] for line in history.read(path)]


def written(path: Path, *values: int) -> Path:
    grown = History(path)
    grown.append(*({"n": value} for value in values))
    grown.close()
    return path


def test_lines_are_there_at_once_and_the_size_is_that_of_the_file(tmp_path: Path):
    path = tmp_path / "h.jsonl"
    assert numbers(path) == []
    grown = History(path)
    for value in range(3):
        grown.append({"n": value, "text": "ä\n"})
        assert numbers(path) == list(range(value + 1))
        assert grown.size == path.stat().st_size
    grown.sync()
    grown.close()
    grown.close()
    assert numbers(written(path, 3, 4)) == [0, 1, 2, 3, 4]


def test_a_known_size_cuts_off_what_follows(tmp_path: Path):
    path = written(tmp_path / "h.jsonl", 0, 1)
    size = path.stat().st_size
    written(path, 2, 3)
    History(path, size).close()
    assert numbers(path) == [0, 1]
    History(path, size + 1000).close()  # a file that lost lines
    assert numbers(path) == [0, 1]
    History(path, size - 1).close()  # not the end of a line
    assert numbers(path) == [0]
    History(path, 0).close()
    assert path.stat().st_size == 0


@pytest.mark.parametrize(
    ("broken", "warning"),
    [
        *((b'{"n": 2}'[:cut], f"half a line ({cut} bytes)") for cut in (1, 7)),
        (b"\x00" * 50 + b"\n\xff\xfe\n", "2 broken lines"),  # blocks that a power failure left
    ],
)
def test_what_is_broken_is_left_out_with_one_warning_and_half_a_line_cut_off_by_the_next_writer(
    broken: bytes, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = written(tmp_path / "h.jsonl", 0, 1)
    with path.open("ab") as file:
        file.write(broken)
    assert numbers(path) == [0, 1]
    (record,) = caplog.records
    assert warning in record.message
    assert numbers(written(path, 2)) == [0, 1, 2]


def test_lines_are_cut_back_from_the_end_without_reading_the_others(tmp_path: Path):
    path = written(tmp_path / "h.jsonl", *range(50_000))
    with path.open("ab") as file:
        file.write(b'{"n": 5')
    with mock.patch.object(os, "pread", wraps=os.pread) as read:
        size = history.kept_size(path, lambda line: line["n"] <= 49_997)
    assert sum(call.args[1] for call in read.call_args_list) < 6 * history._BLOCK_BYTES
    History(path, size).close()
    assert size == path.stat().st_size
    assert numbers(path)[-1] == 49_997
    assert history.kept_size(path, lambda line: False) == 0
    assert history.kept_size(tmp_path / "none.jsonl", lambda line: True) == 0


def test_a_process_that_may_no_longer_write_changes_nothing(tmp_path: Path):
    path = written(tmp_path / "h.jsonl", 0, 1)

    def refuse() -> None:
        raise PermissionError("another launch has taken over")

    grown = History(path, guard=refuse)
    with pytest.raises(PermissionError, match="another launch"):
        grown.append({"n": 2})
    with pytest.raises(PermissionError, match="another launch"):
        History(path, 0, refuse)
    assert numbers(path) == [0, 1]


def test_lines_that_do_not_fit_are_written_once_they_do(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "h.jsonl"
    grown = History(path)
    grown.append({"n": 0})
    with file_size_limit(25):
        grown.append({"n": 1}, {"n": 2})  # half of the last line fits
        grown.append({"n": 3})
        assert path.stat().st_size == 25
        assert numbers(path) == [0, 1]
        with pytest.raises(OSError, match="File too large"):
            grown.sync()
    grown.append({"n": 4})
    grown.sync()
    assert numbers(path) == [0, 1, 2, 3, 4]
    assert grown.size == path.stat().st_size
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == ["ERROR", "WARNING"]


def test_the_memory_for_lines_that_do_not_fit_is_limited_and_those_never_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(history, "MAX_UNWRITTEN_BYTES", 18)
    grown = History(tmp_path / "h.jsonl")
    with file_size_limit(0):
        grown.append({"n": 0}, {"n": 1})
        with pytest.raises(OSError, match="File too large"):
            grown.append({"n": 2})
        grown.close()
    assert "h.jsonl lacks its last 27 bytes: [Errno 27] File too large" in caplog.text


def test_a_tail_yields_each_line_once_also_after_a_cut(tmp_path: Path):
    path, tail = tmp_path / "h.jsonl", Tail(tmp_path / "h.jsonl")

    def poll() -> list[int]:
        return [line["n"] for line in tail.poll()]

    assert poll() == []
    grown = History(path)
    assert poll() == []
    grown.append({"n": 0}, {"n": 1})
    assert (poll(), poll()) == ([0, 1], [])
    grown.append({"n": 2}, {"n": 3})
    size = len(json.dumps({"n": 0}) + "\n") * 2
    History(path, size).append({"n": 20}, {"n": 30}, {"n": 40})  # before the tail has seen 2 and 3
    assert poll() == [20, 30, 40]
    History(path, size).append({"n": 21}, {"n": 31}, {"n": 41})  # as long as before
    assert poll() == []  # until the file grows
    History(path).append({"n": 51})
    assert poll() == [21, 31, 41, 51]
    for half, found in ((b'{"n": ', []), (b"6}\n", [6])):
        with path.open("ab") as file:
            file.write(half)
        assert poll() == found
    History(path, size).append(*({"n": -value} for value in range(2000)))
    assert poll() == [-value for value in range(2000)]
