"""An index of a task file: where each row is, by line, with digests.

The index of a task file: where each row is, and what a sampler has to know of it. Memory-mapped: processes of a
machine share its pages, and it opens in milliseconds whatever its size.

File: MAGIC, length of the header (uint64, little endian), header (JSON), then arrays at multiples of 64 bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util import atomic_file

log = logging.getLogger(__name__)

_SAMPLE_BYTES = 65536  # of the beginning and of the end of a file, in its digest
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # of file systems without flock


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the content of a file without reading all of it."""

    size: int  # bytes
    mtime_ns: int
    digest: str  # of beginning and end

    @classmethod
    def of(cls, path: Path) -> Fingerprint:
        """The fingerprint of a file as it is. Raises OSError."""
        with path.open("rb") as file:
            status, digest = os.fstat(file.fileno()), hashlib.blake2b(digest_size=16)
            for start in (0, max(0, status.st_size - _SAMPLE_BYTES)):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
        return cls(status.st_size, status.st_mtime_ns, digest.hexdigest())


def cache_folder() -> Path:
    """Where files go that cannot be kept beside a task file: XDG_CACHE_HOME, else ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "megatron_webrl" / "tasks"


def name_in_cache(key: object, name: str) -> str:
    """A file name that differs between keys, and ends with a readable name."""
    return f"{hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()}-{name}"


def make_cache_folder() -> Path:
    """The cache folder, made if there is none. Raises ConfigError."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} is not writable; set XDG_CACHE_HOME to a writable folder")
    return folder


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of a file to be written. Where the file system has no locks, several processes may do the work."""
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _locked(lock)
    try:
        atomic_file.remove_leftovers(path.parent)
        yield
    finally:
        lock.unlink(missing_ok=True)  # before the lock is released: the next holder makes a file of its own
        os.close(descriptor)


def _locked(lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _flock(descriptor, lock)
            try:
                if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except FileNotFoundError:
                pass  # its holder finished, and removed it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int, lock: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process that writes %s", lock.with_suffix(""))
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


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
