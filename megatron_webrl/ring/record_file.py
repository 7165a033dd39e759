"""Record files, such as demonstrations: records with length and checksum, then a trailer; named once complete."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megatron_webrl.ring.checksum import checksum
from megatron_webrl.ring.errors import RecordError
from megatron_webrl.util import atomic_file

MAGIC = b"WEBRLFIL"
FORMAT_VERSION = 1
_END = 2**64 - 1  # in place of a length: the trailer, whose second number is the count of records
_HEAD = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<QQ")


class RecordFileWriter:
    """Writes records to a temporary file next to `path`, and renames it when it is closed without an error."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = atomic_file.temporary_path(self.path)
        self._file: BinaryIO | None = self._temporary.open("wb")
        self._file.write(_HEAD.pack(MAGIC, FORMAT_VERSION))
        self.records = 0

    def write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Append one record, the buffers one after the other; returns its position, for `read_record`."""
        if self._file is None:
            raise RecordError(f"record file {self.path} is closed; nothing can be added to it")
        record, position = b"".join(buffers), self._file.tell()
        self._file.write(_ENTRY.pack(len(record), checksum(record)))
        self._file.write(record)
        self.records += 1
        return position

    def close(self) -> None:
        """Write the trailer, sync the file and rename it. A second call does nothing. Raises OSError."""
        if self._file is None:
            return
        try:
            self._file.write(_ENTRY.pack(_END, self.records))
            self._file.flush()
            os.fsync(self._file.fileno())
            atomic_file.publish(self._temporary, self.path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary file. Without effect after `close`."""
        if self._file is not None:
            with suppress(OSError):  # of bytes that were never written
                self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> RecordFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def read_record_file(path: str | Path) -> Iterator[bytes]:
    """Yield the records of a file in order, one in memory at a time. Raises RecordError for a damaged file."""
    path = Path(path)
    size, count = path.stat().st_size, 0
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if head[:8] != MAGIC or len(head) < _HEAD.size:
            raise RecordError(f"{path} is not a record file: it begins with {head[:8]!r}, not {MAGIC!r}")
        version = _HEAD.unpack(head)[1]
        if version != FORMAT_VERSION:
            raise RecordError(
                f"{path} has format {version}, this program reads {FORMAT_VERSION}; use the one that wrote it"
            )
        while True:
            entry = file.read(_ENTRY.size)
            if len(entry) < _ENTRY.size:
                raise RecordError(f"{path} is truncated after {count} records, at byte {size}")
            length, expected = _ENTRY.unpack(entry)
            if length == _END:
                break
            if file.tell() + length > size:
                remaining = size - file.tell()
                raise RecordError(f"{path} is truncated: record {count} claims {length} bytes, {remaining} follow")
            record = file.read(length)
            if checksum(record) != expected:
                raise RecordError(f"{path}: record {count} of {length} bytes does not match its checksum")
            yield record
            count += 1
        if expected != count or file.tell() != size:
            raise RecordError(
                f"{path} is damaged: {count} records, its trailer says {expected}, {size - file.tell()} bytes follow"
            )


def read_record(path: str | Path, position: int) -> bytes:
    """The record at a position of a file. Raises RecordError for a damaged file, OSError."""
    path = Path(path)
    with path.open("rb") as file:
        file.seek(position)
        entry = file.read(_ENTRY.size)
        length, expected = _ENTRY.unpack(entry) if len(entry) == _ENTRY.size else (_END, 0)
        if length > path.stat().st_size:
            raise RecordError(f"{path} has no record at byte {position}")
        record = file.read(length)
    if len(record) < length or checksum(record) != expected:
        raise RecordError(f"{path}: the record of {length} bytes at byte {position} does not match its checksum")
    return record


def count_records(path: str | Path) -> int:
    """The number of records by the trailer of a file. Raises RecordError for a file without a trailer."""
    path = Path(path)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _ENTRY.size))
        entry = file.read(_ENTRY.size)
    length, count = _ENTRY.unpack(entry) if len(entry) == _ENTRY.size else (0, 0)
    if length != _END:
        raise RecordError(f"{path} is truncated: it has no trailer")
    return int(count)
