"""A folder that gets its name only when it is complete."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TargetFolderError(ValueError):
    """A folder that cannot be written. The message names it."""


@contextmanager
def atomic_folder(target: Path, source: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends well, and is removed otherwise.

    What killed processes of this machine left of earlier tries is removed first. Raises StagingError if the target
    exists and is no empty folder, unless `overwrite` is set, and if it holds `source`.
    """
    target, source = target.absolute(), source.resolve()
    if source.is_relative_to(target.resolve()):
        raise TargetFolderError(f"{target} holds the input {source}; name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if taken and not overwrite:
        raise TargetFolderError(f"{target} is not an empty folder; name another one or pass --overwrite to replace it")
    temporary = target.parent / f"{_prefix(target)}{os.getpid()}"
    temporary.mkdir()
    try:
        yield temporary
        _sync(temporary)
        if taken:
            aside = target.parent / f"{_prefix(target)}{os.getpid()}-old"
            target.rename(aside)
            temporary.rename(target)
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
        else:
            temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free_space(folder: Path, size: int) -> None:
    """Raise StagingError unless the folder's file system has `size` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetFolderError(
            f"{folder} has {free / 1e9:.2f} GB left, but {size / 1e9:.2f} GB are needed; free some or write elsewhere"
        )


def _prefix(target: Path) -> str:
    return f".{target.name}.writing-{socket.gethostname()}-"


def _sweep(target: Path) -> None:
    prefix = _prefix(target)
    for path in list(target.parent.iterdir()):
        process = path.name.removeprefix(prefix).removesuffix("-old")
        if not path.name.startswith(prefix) or not process.isdigit() or Path("/proc", process).exists():
            continue
        if path.name.endswith("-old") and not target.exists():
            path.rename(target)  # the process was killed between taking the old folder away and naming the new one
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(folder: Path) -> None:
    """Bring a folder's names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
