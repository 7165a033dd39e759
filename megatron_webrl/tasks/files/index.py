"""The index of a task file: where each row is, and what a sampler has to know of it. Memory-mapped: processes of a
machine share its pages, and it opens in milliseconds whatever its size.

File: MAGIC, length of the header (uint64, little endian), header (JSON), then arrays at multiples of 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from megatron_webrl.tasks.files.cache import Fingerprint

VERSION = 2  # of this format, and of what a row means: another one makes every index be written again
MAGIC = b"WEBRLIDX"
DTYPES = {
    "offsets": "<i8",  # [rows] bytes
    "lengths": "<i4",  # [rows] bytes
    "lines": "<i4",  # [rows] from 1
    "levels": "|u1",  # [rows] index into DIFFICULTIES
    "website_ids": "<i4",  # [rows] index into websites
    "task_keys": "<u8",  # [rows]
    "website_keys": "<u8",  # [websites] ascending
    "website_ends": "<i8",  # [websites] end of each name in website_names
    "website_names": "|u1",  # UTF-8
}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64


class WebsiteNames(Sequence[str]):
    """The websites of a file, by the key of their names. Names are decoded when they are asked for."""

    def __init__(self, keys: np.ndarray, ends: np.ndarray, names: np.ndarray) -> None:
        self.keys, self._ends, self._names = keys, ends, names

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        start = int(self._ends[number - 1]) if number else 0
        return self._names[start : int(self._ends[number])].tobytes().decode()

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Number of a website, by binary search. Raises ValueError."""
        key = website_key(value)
        number = int(np.searchsorted(self.keys, np.uint64(key)))
        if number in range(len(self))[start:stop] and self.keys[number] == key:
            return number
        raise ValueError(f"{value!r} is not among the websites")

    def __contains__(self, value: object) -> bool:
        try:
            return isinstance(value, str) and self.index(value) >= 0
        except ValueError:
            return False


@dataclass(frozen=True)
class TaskIndex:
    """An opened index; its arrays are those of DTYPES."""

    offsets: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    levels: np.ndarray
    website_ids: np.ndarray
    task_keys: np.ndarray
    websites: WebsiteNames
    domains: tuple[str, ...]  # names of environments; empty if there are more than MAX_DOMAINS
    public_website: str  # the first that is in the network; empty: none is
    local_website: str  # the first that is not
    digest: str  # of the rows, and of the fields that are read of them

    def __len__(self) -> int:
        return len(self.offsets)

    def shared_websites(self, other: TaskIndex) -> list[str]:
        """Websites that are in both files, sorted."""
        _, mine, _ = np.intersect1d(self.websites.keys, other.websites.keys, assume_unique=True, return_indices=True)
        return sorted(self.websites[int(number)] for number in mine)


def website_key(name: str) -> int:
    """64 bits that stand for a website."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def write_index(file: BinaryIO, arrays: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> None:
    """Write an index. `arrays` has the names of DTYPES; `header` gets version and places of the arrays."""
    places, blocks, end = {}, [], 0
    for name, dtype in DTYPES.items():
        data = np.ascontiguousarray(arrays[name], dtype).tobytes()
        places[name] = (end, len(arrays[name]))
        blocks.append(data.ljust(_aligned(len(data)), b"\0"))
        end += len(blocks[-1])
    text = json.dumps({**header, "version": VERSION, "arrays": places, "bytes": end}).encode()
    file.write((MAGIC + _LENGTH.pack(len(text)) + text).ljust(_data_start(len(text)), b"\0"))
    file.writelines(blocks)


def read_index(path: Path, fingerprint: Fingerprint, fields: str) -> TaskIndex | None:
    """Open the index of a file with this fingerprint and field map; None if there is none that fits."""
    try:
        with path.open("rb") as file:
            prefix = file.read(len(MAGIC) + _LENGTH.size)
            if not prefix.startswith(MAGIC) or len(prefix) < len(MAGIC) + _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(prefix[len(MAGIC) :])
            header = json.loads(file.read(length))
            wanted = {"version": VERSION, "fields": fields, "file": asdict(fingerprint)}
            start = _data_start(length)
            size = os.fstat(file.fileno()).st_size
            if any(header.get(key) != value for key, value in wanted.items()) or size != start + header["bytes"]:
                return None
            data = np.memmap(file, mode="r", dtype=np.uint8)
    except (OSError, ValueError):  # ValueError: the header is cut
        return None
    arrays = {}
    for name, (offset, count) in header["arrays"].items():
        dtype = np.dtype(DTYPES[name])
        arrays[name] = data[start + offset : start + offset + count * dtype.itemsize].view(dtype)
    websites = WebsiteNames(*(arrays.pop(name) for name in ("website_keys", "website_ends", "website_names")))
    return TaskIndex(
        **arrays,
        websites=websites,
        domains=tuple(header["domains"]),
        public_website=header["public_website"],
        local_website=header["local_website"],
        digest=header["digest"],
    )


def _data_start(header_bytes: int) -> int:
    return _aligned(len(MAGIC) + _LENGTH.size + header_bytes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
