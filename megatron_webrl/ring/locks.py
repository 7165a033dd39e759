"""Polling with a time limit, and the two locks of a segment.

Both locks are on the segment's own file: unlinking the segment leaves no lock file, and the kernel releases
both when their holder dies. They are of two kinds that do not affect each other:

- lifetime: flock. Shared by all attached processes, exclusive for creating and sweeping.
- allocation: an open-file-description lock on the file's first byte. Exclusive, for some microseconds.

A lock belongs to the open file, which a forked child shares with its parent. So a forked child attaches again.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_webrl.ring.errors import RingError

INITIAL_PAUSE_SECONDS = 20e-6
MAX_PAUSE_SECONDS = 2e-3
MAX_YIELDS = 20
# struct flock of the file's first byte
_LOCK, _UNLOCK = (struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))


def poll_with_backoff(seconds: float, max_pause_seconds: float = MAX_PAUSE_SECONDS) -> Iterator[None]:
    """Yield at once, then after growing pauses, and a last time when `seconds` have passed.

    Not tenacity: with it, writing a record of 100 bytes takes 52 us instead of 18 (docs/ring.md).
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
