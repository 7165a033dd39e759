"""Replace a file so that a reader, also one after a crash or a power failure, finds its old or its new content, whole.

The content goes to a temporary file in the same folder, `.NAME.HOST.PID.NUMBER.writing`, is flushed and synced, and the
temporary file is renamed; then the folder is synced. An exception removes the temporary file. What a killed process
left is removed by `remove_leftovers`, at the next start of whatever uses the folder.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

LEFTOVER_SECONDS = 3600.0  # age from which a temporary file of another host counts as left over
_TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.writing")
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)  # of file systems on which folders cannot be synced


@contextmanager
def replacing(path: Path, mode: int = 0o666, folder: Path | None = None) -> Iterator[BinaryIO]:
    """A binary file for the new content of `path`, which appears there, on disk, at the end. Raises OSError.

    `mode`: permissions, less the umask. `folder`: for the temporary file, on the same file system.
    """
    temporary = temporary_path(path if folder is None else folder / path.name)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(content)


def write_text(path: Path, content: str, mode: int = 0o666) -> None:
    """Replace a text file, in UTF-8. Raises OSError."""
    write_bytes(path, content.encode(), mode)


def write_json(path: Path, content: Any, indent: int | None = None, mode: int = 0o666) -> None:
    """Replace a JSON file. Raises OSError."""
    write_text(path, json.dumps(content, indent=indent) + "\n", mode)


def temporary_path(path: Path) -> Path:
    """A name for the content of `path` while it is written; no other writer has it."""
    return path.with_name(f".{path.name[:40]}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}.writing")


def publish(temporary: Path, path: Path) -> None:
    """Give a synced file or folder its final name on the same file system, and sync its folder. Raises OSError."""
    temporary.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush a folder and everything below it to disk. Raises OSError."""
    for path, _, names in os.walk(folder):
        for name in names:
            fsync(Path(path, name))
        fsync(Path(path))


def remove_leftovers(folder: Path) -> list[str]:
    """Remove temporary files of killed processes from a folder, not those below it; returns their names.

    A process of another host counts as killed an hour after its last write. Raises OSError.
    """
    left = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False) and _is_left(entry)]
    for entry in left:
        Path(entry).unlink(missing_ok=True)
    return sorted(entry.name for entry in left)


def _is_left(entry: os.DirEntry[str]) -> bool:
    match = _TEMPORARY.fullmatch(entry.name)
    if match is None:
        return False
    if match["host"] == _host():
        return not Path("/proc", match["pid"]).exists()
    try:
        return time.time() - entry.stat().st_mtime > LEFTOVER_SECONDS
    except FileNotFoundError:
        return False  # its writer has finished


def _host() -> str:
    return socket.gethostname().replace(".", "_")[:40]


@contextmanager
def continue_without(what: str) -> Iterator[None]:
    """Log that `what` could not be written, instead of raising OSError."""
    try:
        yield
    except OSError as error:
        log.error("%s cannot be written: %s; the job continues without it", what, first_line(error))
