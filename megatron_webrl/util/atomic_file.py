"""Replace a file so that a reader, also one after a crash or a power failure, finds its old or its new content, whole.

The content goes to a temporary file in the same folder, `.NAME.NUMBER.writing`, is flushed and synced, and the
temporary file is renamed; then the folder is synced. An exception removes the temporary file. What a killed process
left is removed by `remove_leftovers`, at a later start of whatever uses the folder.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

LEFTOVER_SECONDS = 3600.0  # without a write, after which the writer of a temporary file counts as killed
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
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.writing")


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


def remove_leftovers(folder: Path, seconds: float = LEFTOVER_SECONDS) -> list[str]:
    """Remove temporary files without a write for `seconds` from a folder, not those below it; returns their names.

    Raises OSError.
    """
    left = []
    for path in sorted(folder.glob(".*.writing")):
        with suppress(FileNotFoundError):  # its writer has finished
            if path.is_file() and time.time() - path.stat().st_mtime >= seconds:
                path.unlink()
                left.append(path.name)
    return left


@contextmanager
def continue_without(what: str) -> Iterator[None]:
    """Log that `what` could not be written, instead of raising OSError."""
    try:
        yield
    except OSError as error:
        log.error("%s cannot be written: %s; the job continues without it", what, first_line(error))
