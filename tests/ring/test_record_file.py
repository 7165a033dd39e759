"""Record files and the checksum of records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.ring.record import RecordFileWriter, read_record_file
from megatron_webrl.ring.segment import CHECKSUM_PAGE_BYTES, RecordError, checksum

RECORDS = [b"first", b"", np.random.default_rng(0).bytes(20_000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new folder" / "demonstrations.records"
    with RecordFileWriter(path) as file:
        for record in RECORDS:
            file.write([record[:3], memoryview(record)[3:]])
        assert not path.exists()
    return path


def test_records_come_back_in_order_and_nothing_else_is_left(path: Path) -> None:
    assert list(read_record_file(path)) == RECORDS
    assert list(path.parent.iterdir()) == [path]


def test_a_file_without_records_is_complete(tmp_path: Path) -> None:
    RecordFileWriter(tmp_path / "empty").close()
    assert list(read_record_file(tmp_path / "empty")) == []


def test_an_error_while_writing_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> None:
        with RecordFileWriter(tmp_path / "never") as file:
            file.write([b"x"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_file_truncated_anywhere_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in [*range(120), *range(120, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=r"truncated|not a record file"):
            list(read_record_file(path))


def test_damage_is_named(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"first", b"fjrst"))
    with pytest.raises(RecordError, match="record 0 of 5 bytes does not match its checksum"):
        list(read_record_file(path))
    path.write_bytes(whole + b"more")
    with pytest.raises(RecordError, match="4 bytes follow"):
        list(read_record_file(path))
    path.write_bytes(b"other" * 100)
    with pytest.raises(RecordError, match="is not a record file"):
        list(read_record_file(path))


@pytest.mark.parametrize("size", [0, 1, CHECKSUM_PAGE_BYTES - 1, CHECKSUM_PAGE_BYTES, 5 * CHECKSUM_PAGE_BYTES + 13])
def test_the_checksum_detects_single_bits_swapped_words_swapped_pages_and_stale_pages(size: int) -> None:
    data = bytearray(np.random.default_rng(size).bytes(size))
    expected = checksum(bytes(data))
    assert checksum(memoryview(data)) == expected
    for position in range(0, size, max(1, size // 50)):
        data[position] ^= 1 << position % 8
        assert checksum(memoryview(data)) != expected
        data[position] ^= 1 << position % 8
    if size < 3 * CHECKSUM_PAGE_BYTES:
        return
    for step in (8, CHECKSUM_PAGE_BYTES):
        swapped = bytearray(data)
        swapped[0:step], swapped[step : 2 * step] = data[step : 2 * step], data[0:step]
        assert checksum(memoryview(swapped)) != expected
    stale = bytearray(data)
    stale[CHECKSUM_PAGE_BYTES : 2 * CHECKSUM_PAGE_BYTES] = bytes(CHECKSUM_PAGE_BYTES)
    assert checksum(memoryview(stale)) != expected
