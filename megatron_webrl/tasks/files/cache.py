"""Files made from task files: where they are kept, and how one process at a time writes them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
