"""The shared-memory file that holds a ring: words with memory order, checksum, locks, creation, attaching, sweeping.

Not multiprocessing.shared_memory: its tracker unlinks a segment when a process that only attached to it ends.

Words are loaded with acquire and stored with release order: a commit word publishes all earlier writes. On Arm a plain
store does not, and libatomic's functions order the accesses; on x86-64 plain aligned 8-byte accesses do.

The checksum of a record: its matrix of rows of 512 words (4 KiB) is summed along both axes modulo 2^64. A wrong word
changes a row and a column sum, a wrong or stale page its row sum, swapped words column sums, swapped pages the order of
row sums; only errors that cancel in both directions at once pass. The CRC-32 of each list of sums makes 64 bits. For
records of megabytes this is about four times as fast as zlib's CRC-32 over all bytes (docs/rollout.md).

Both locks are on the segment's own file, so that nothing is left behind and the kernel releases them when their holder
dies; they do not affect each other. A forked child shares them with its parent, and so attaches again.

- lifetime: flock. Shared by all attached processes, exclusive for creating and sweeping.
- allocation: an open-file-description lock on the file's first byte. Exclusive, for some microseconds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import platform
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np


class RingError(RuntimeError):
    """The operation on the ring failed."""


class RingFull(RingError):
    """No space became free within the time limit: the readers acknowledge too slowly or not at all."""


class RecordTooLarge(RingError):
    """The record is larger than the ring."""


class RecordCorrupt(RingError):
    """The bytes of a committed record do not match their checksum."""


class RecordError(ValueError):
    """The bytes are not one complete record of the known format, or a trajectory cannot be encoded."""


ACQUIRE, RELEASE = 2, 3  # __ATOMIC_ACQUIRE and __ATOMIC_RELEASE of the C ABI
TSO_MACHINES = frozenset({"x86_64", "AMD64"})

Load = Callable[[int], int]
Store = Callable[[int, int], None]


def load_libatomic() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libatomic.so.1")
    except OSError:
        return None


def accessors(machine: str, atomic: ctypes.CDLL | None) -> tuple[Load, Store]:
    """Functions (address) -> value and (address, value) for this machine. Raises RingError where none is safe."""
    if atomic is not None:
        load_8, store_8 = getattr(atomic, "__atomic_load_8"), getattr(atomic, "__atomic_store_8")
        load_8.argtypes, load_8.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_uint64
        store_8.argtypes, store_8.restype = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int), None
        return lambda address: load_8(address, ACQUIRE), lambda address, value: store_8(address, value, RELEASE)
    if machine not in TSO_MACHINES:
        raise RingError(
            f"machine {machine} does not order plain memory accesses and libatomic.so.1 is missing; "
            "install it (Debian: libatomic1)"
        )
    word = ctypes.c_uint64.from_address

    def store(address: int, value: int) -> None:
        word(address).value = value

    return lambda address: word(address).value, store


class AtomicWords:
    """The 8-byte words of a mapping by byte offset; offsets must be multiples of 8."""

    load: Callable[[int], int]  # offset -> the word, with acquire order
    store: Callable[[int, int], None]  # write the word at an offset, with release order

    def __init__(self, mapping: mmap.mmap) -> None:
        load, store = accessors(platform.machine(), load_libatomic())
        # The temporary object must not outlive this line: it would keep the mapping from being closed.
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.load = lambda offset: load(base + offset)
        self.store = lambda offset, value: store(base + offset, value)

    def invalidate(self) -> None:
        """Refuse every later access: an access to an unmapped address would crash the process."""
        self.load = self.store = _closed


def _closed(*_: int) -> NoReturn:
    raise RingError("the ring is closed; attach again")


PAGE_WORDS = 512
CHECKSUM_PAGE_BYTES = PAGE_WORDS * 8


def checksum(buffer: bytes | memoryview) -> int:
    """64-bit checksum of a contiguous buffer, the same on every little-endian machine."""
    view = memoryview(buffer)
    whole = view.nbytes // CHECKSUM_PAGE_BYTES * CHECKSUM_PAGE_BYTES
    rows = columns = b""
    if whole:
        words = np.frombuffer(view, "<u8", whole // 8).reshape(-1, PAGE_WORDS)
        rows, columns = np.add.reduce(words, axis=1).data.cast("B"), np.add.reduce(words, axis=0).data.cast("B")
    with view[whole:] as tail:
        return zlib.crc32(columns) << 32 | zlib.crc32(tail, zlib.crc32(rows))


INITIAL_PAUSE_SECONDS = 20e-6
MAX_PAUSE_SECONDS = 2e-3
MAX_YIELDS = 20
# struct flock of the file's first byte
_LOCK, _UNLOCK = (struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))


def poll_with_backoff(seconds: float, max_pause_seconds: float = MAX_PAUSE_SECONDS) -> Iterator[None]:
    """Yield at once, then after growing pauses, and a last time when `seconds` have passed.

    Not tenacity: with it, writing a record of 100 bytes takes 52 us instead of 18 (docs/rollout.md).
    """
    deadline, pause = time.monotonic() + seconds, INITIAL_PAUSE_SECONDS
    yield
    while (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, remaining))
        pause = min(pause * 2, max_pause_seconds)
        yield


def try_lifetime_lock(fd: int, kind: int) -> bool:
    """Take the lifetime lock (fcntl.LOCK_SH or LOCK_EX) without waiting; False if another process has it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class AllocationLock:
    """Mutual exclusion of all threads of all processes that are attached to the segment `fd`."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name, self._pid = fd, name, os.getpid()
        self._threads = threading.Lock()

    @contextmanager
    def acquire(self, seconds: float, last_holder: Callable[[], int]) -> Iterator[None]:
        """Hold the lock within the context. `last_holder()` gives the pid that the error names after `seconds`."""
        if os.getpid() != self._pid:
            raise RingError(
                f"ring {self._name} was attached by process {self._pid} and is used by its fork {os.getpid()}, which "
                "shares its locks; attach in the process that uses it"
            )
        if not self._threads.acquire(timeout=seconds):
            raise RingError(f"ring {self._name}: another thread of this process held the lock for {seconds:g} s")
        try:
            self._lock_file(seconds, last_holder)
            try:
                yield
            finally:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _UNLOCK)
        finally:
            self._threads.release()

    def _lock_file(self, seconds: float, last_holder: Callable[[], int]) -> None:
        for _ in poll_with_backoff(seconds):
            # The lock is held for microseconds, the shortest sleep takes about 70: yield a few times first.
            for _ in range(MAX_YIELDS):
                try:
                    fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK)
                    return
                except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: locked
                    os.sched_yield()
        raise RingError(
            f"ring {self._name}: the allocation lock was not free within {seconds:g} s; process {last_holder()} "
            "took it last and may be stopped: continue or kill it"
        )


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
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RingError(f"{path} is a symbolic link; remove it, or use another run.name") from error


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
