"""What a job does when its disk is full, read-only or broken, or does not answer."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INFRASTRUCTURE_EXIT_CODE = 74  # of a role or a job that lost its file system, or a job that lost its control service
_FILE_SYSTEM_ERRORS = {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EROFS}
STALL_SECONDS = 300.0  # from which a file system that does not answer counts as lost
TOUCH_SECONDS = 15.0


def is_file_system_failure(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that a file system failed; a full disk is no such failure."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FILE_SYSTEM_ERRORS:
            return True
        error = error.__cause__
    return False


@contextmanager
def watch_for_stall(folder: Path, on_stall: Callable[[str], object]) -> Iterator[None]:
    """Call `on_stall`, in a thread, with a message when the file system of `folder` has not answered STALL_SECONDS.

    A thread touches the folder every TOUCH_SECONDS; a file system that fails has answered.
    """
    end, message = threading.Event(), f"the file system of {folder} has stalled for {STALL_SECONDS:.0f} s"

    def touch() -> None:
        while not end.is_set():
            alarm = threading.Timer(STALL_SECONDS, lambda: end.is_set() or on_stall(message))
            alarm.daemon = True
            alarm.start()
            with suppress(OSError):
                os.utime(folder)
            alarm.cancel()
            end.wait(TOUCH_SECONDS)

    threading.Thread(target=touch, name="disk stall", daemon=True).start()
    try:
        yield
    finally:
        end.set()
