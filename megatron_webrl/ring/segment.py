"""The file in shared memory that holds a ring: layout, creation, attaching, sweeping.

Not multiprocessing.shared_memory: its tracker unlinks a segment when a process that only attached to it ends.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.ring.atomic_words import AtomicWords
from megatron_webrl.ring.errors import RingError
from megatron_webrl.ring.locks import poll_with_backoff, try_lifetime_lock

SHM_FOLDER = Path("/dev/shm")
MAGIC = int.from_bytes(b"WEBRLRNG", "little")
FORMAT_VERSION = 1
PAGE_BYTES = 4096
SLOT_BYTES = 64  # one cache line
BYTES_PER_SLOT = 8192  # data area per slot: the data area fills before the table, unless records are tiny
MIN_SLOTS = 64
JOB_ID_BYTES = 128

# Byte offsets in the header. The magic is stored last: it is the commit word of the creation.
MAGIC_OFFSET, FORMAT_VERSION_OFFSET, CAPACITY_OFFSET, SLOTS_OFFSET = 0, 8, 16, 24
NAMESPACE_OFFSET, JOB_ID_OFFSET = 32, 64
FIRST_OFFSET, NEXT_OFFSET, HOLDER_OFFSET = 256, 320, 384  # each on its own cache line
SLOT_TABLE_OFFSET = PAGE_BYTES


@dataclass(frozen=True)
class SegmentLayout:
    """Sizes of one segment, in bytes except for `slots`."""

    capacity: int  # data area
    slots: int

    @classmethod
    def for_size(cls, size_bytes: int) -> SegmentLayout:
        """The layout with at least `size_bytes` of data."""
        if size_bytes <= 0:
            raise RingError(f"size_bytes={size_bytes} of a ring must be greater than 0")
        capacity = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        return cls(capacity, max(MIN_SLOTS, capacity // BYTES_PER_SLOT))

    @property
    def data_offset(self) -> int:
        return SLOT_TABLE_OFFSET + -(-self.slots * SLOT_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        return self.data_offset + self.capacity


@dataclass(frozen=True)
class Segment:
    """An attached segment. `fd` has the shared lifetime lock."""

    name: str
    job_id: str
    fd: int
    pid: int  # of the process that attached
    mapping: mmap.mmap
    words: AtomicWords
    layout: SegmentLayout


def segment_name(run: str, identity: str) -> str:
    """The name of a run's segment, `webrl-<run>-<short id>`; the id is a hash of `identity`."""
    return segment_prefix(run) + hashlib.blake2s(identity.encode(), digest_size=4).hexdigest()


def segment_prefix(run: str) -> str:
    """The common prefix of the names of a run's segments."""
    return f"webrl-{re.sub(r'[^A-Za-z0-9._-]', '_', run)[:64]}-"


def create_or_attach(name: str, size_bytes: int, job_id: str, seconds: float) -> Segment:
    """Attach the segment of this name; create it if it is missing or incomplete. Raises RingError."""
    if len(job_id.encode()) > JOB_ID_BYTES:
        raise RingError(f"job id {job_id!r} is longer than {JOB_ID_BYTES} bytes")
    path, layout = _path(name), SegmentLayout.for_size(size_bytes)
    for _ in poll_with_backoff(seconds):
        with _opened_private(path, os.O_CREAT) as opened:
            fd = opened.fd
            if try_lifetime_lock(fd, fcntl.LOCK_EX) and _is_at(fd, path) and not _is_complete(fd):
                _initialise(fd, path, layout, job_id)
            # Converting the lock to a shared one releases it for a moment, in which a sweep may run: check again.
            if try_lifetime_lock(fd, fcntl.LOCK_SH) and _is_at(fd, path) and _is_complete(fd):
                segment = _map(fd, name)
                opened.keep = True
                break
    else:
        raise RingError(
            f"ring {name} could not be created within {seconds:g} s: its file stays locked by another process"
        )
    if segment.job_id != job_id or segment.layout != layout:
        detach(segment)
        raise RingError(
            f"ring {name} exists with job id {segment.job_id!r} and {segment.layout.capacity} bytes, not {job_id!r} "
            f"and {layout.capacity} bytes; use another name, or unlink {path} if its run is over"
        )
    return segment


def attach(name: str, seconds: float, job_id: str | None = None) -> Segment:
    """Attach a segment once another process creates it; does not lock one of another job. Raises RingError."""
    path, other = _path(name), ""
    for _ in poll_with_backoff(seconds, max_pause_seconds=0.02):
        try:
            with _opened_private(path) as opened:
                if job_id is not None and _is_complete(opened.fd) and (found := _job_id(opened.fd)) != job_id:
                    other = f"; the one at {path} is of another job, {found}"
                    continue
                if try_lifetime_lock(opened.fd, fcntl.LOCK_SH) and _is_at(opened.fd, path) and _is_complete(opened.fd):
                    opened.keep = True
                    return _map(opened.fd, name)
        except FileNotFoundError:
            pass
    raise RingError(f"ring {name} was not there within {seconds:g} s: no process created {path}{other}")


def detach(segment: Segment) -> None:
    """Detach. The memory stays mapped while views of it exist."""
    segment.words.invalidate()
    if segment.pid == os.getpid():  # a fork shares the lock of its parent
        fcntl.flock(segment.fd, fcntl.LOCK_UN)  # the mapping holds a duplicate of fd: closing fd is not enough
    os.close(segment.fd)
    with suppress(BufferError):  # views exist: the mapping is freed with the last of them
        segment.mapping.close()


def unlink(segment: Segment) -> None:
    """Remove the name. Attached processes keep the memory; later ones create another segment."""
    path = _path(segment.name)
    if _is_at(segment.fd, path):
        path.unlink(missing_ok=True)


def sweep_segments(prefix: str = "webrl-") -> list[str]:
    """Remove the segments with this prefix that no process uses; returns their names. Files of other users stay."""
    if not prefix:
        raise RingError("sweep needs a prefix, such as 'webrl-'; an empty one would match every file in shared memory")
    removed = []
    for path in sorted(SHM_FOLDER.glob(f"{prefix}*")):
        try:
            with _opened(path) as opened:
                if _is_ours(opened.fd) and try_lifetime_lock(opened.fd, fcntl.LOCK_EX) and _is_at(opened.fd, path):
                    path.unlink()
                    removed.append(path.name)
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            continue  # removed meanwhile, or of another user
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a symbolic link or a socket: no segment
                raise
    return removed


@dataclass
class _Opened:
    fd: int
    keep: bool = False


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[_Opened]:
    """Open the file for reading and writing; unless `keep` is set, the end closes it and releases its locks."""
    opened = _Opened(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600))
    try:
        yield opened
    except BaseException:
        opened.keep = False
        raise
    finally:
        if not opened.keep:
            os.close(opened.fd)


@contextmanager
def _opened_private(path: Path, flags: int = 0) -> Iterator[_Opened]:
    """As `_opened`. Raises RingError for a file that another user owns or may read or change: anyone can make one."""
    try:
        with _opened(path, flags) as opened:
            status = os.fstat(opened.fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise RingError(
                    f"{path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):03o}; a ring "
                    f"must belong to this user, {os.geteuid()}, and be closed to others (600): remove the file, or use "
                    "another run.name"
                )
            yield opened
    except PermissionError as error:
        raise RingError(f"{path} belongs to another user; remove the file, or use another run.name") from error


def _path(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}", name):
        raise RingError(f"ring name {name!r} is not a plain file name of letters, digits, '.', '_' and '-'")
    return SHM_FOLDER / name


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still at `path`, not unlinked meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _is_complete(fd: int) -> bool:
    magic = os.pread(fd, 8, MAGIC_OFFSET)
    if magic.strip(b"\0") and magic != MAGIC.to_bytes(8, "little"):
        raise RingError(f"a file in {SHM_FOLDER} with a ring's name begins with {magic!r}; it is no ring: move it away")
    return len(magic) == 8 and magic.strip(b"\0") != b""


def _is_ours(fd: int) -> bool:
    """Whether this is a ring, or an incomplete one whose creator died: an empty or zeroed file."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    magic = os.pread(fd, 8, MAGIC_OFFSET)
    return magic == MAGIC.to_bytes(8, "little") or not magic.strip(b"\0")


def _initialise(fd: int, path: Path, layout: SegmentLayout, job_id: str) -> None:
    try:
        os.ftruncate(fd, 0)
        # Allocate every page: a write to a page for which shared memory has no space would kill the process.
        os.posix_fallocate(fd, 0, layout.total_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free = os.statvfs(SHM_FOLDER)
        raise RingError(
            f"ring {path.name} needs {layout.total_bytes} bytes, {SHM_FOLDER} has "
            f"{free.f_bavail * free.f_frsize} free; lower ring.capacity_mib or enlarge {SHM_FOLDER}"
        ) from error
    encoded = job_id.encode()
    os.pwrite(fd, struct.pack("<Q128s", len(encoded), encoded), JOB_ID_OFFSET)
    os.pwrite(
        fd, struct.pack("<4Q", FORMAT_VERSION, layout.capacity, layout.slots, _pid_namespace()), FORMAT_VERSION_OFFSET
    )
    os.pwrite(fd, struct.pack("<Q", MAGIC), MAGIC_OFFSET)


def _map(fd: int, name: str) -> Segment:
    version, capacity, slots, namespace = struct.unpack("<4Q", os.pread(fd, 32, FORMAT_VERSION_OFFSET))
    if version != FORMAT_VERSION:
        raise RingError(
            f"ring {name} has format {version}, this program reads {FORMAT_VERSION}; remove {SHM_FOLDER / name}"
        )
    if namespace != _pid_namespace():
        raise RingError(
            f"ring {name} was created in another PID namespace, where process ids mean other processes; "
            "run all roles of a node in one container, or share its PID namespace"
        )
    layout = SegmentLayout(capacity, slots)
    if os.fstat(fd).st_size < layout.total_bytes:
        raise RingError(
            f"ring {name} has {os.fstat(fd).st_size} of {layout.total_bytes} bytes; remove {SHM_FOLDER / name}"
        )
    # Map all pages at once: a page fault for each costs as much as copying its content.
    mapping = mmap.mmap(fd, layout.total_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return Segment(name, _job_id(fd), fd, os.getpid(), mapping, AtomicWords(mapping), layout)


def _job_id(fd: int) -> str:
    length, job_id = struct.unpack("<Q128s", os.pread(fd, 8 + JOB_ID_BYTES, JOB_ID_OFFSET))
    return job_id[:length].decode()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
