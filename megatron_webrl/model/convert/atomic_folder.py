"""Write a folder under a temporary name and rename it when it is complete."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_webrl.util import atomic_file


class TargetFolderError(ValueError):
    """A target folder cannot be written. The message names it."""


@contextmanager
def atomic_folder(target: Path, source: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder next to `target`; rename it to `target` on success, remove it on an exception.

    Temporary folders of killed processes on this machine are removed first. Raises TargetFolderError if the target
    contains `source`, or if it exists and is not an empty folder, unless `overwrite` is set.
    """
    target, source = target.resolve(), source.resolve()  # a link is kept, the folder behind it replaced
    if source.is_relative_to(target):
        raise TargetFolderError(f"{target} holds the input {source}; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        raise TargetFolderError(
            f"{target} is not an empty folder; choose another one or pass --overwrite to replace it"
        )
    temporary = target.parent / f"{_prefix(target)}{os.getpid()}"
    temporary.mkdir()
    try:
        yield temporary
        atomic_file.fsync_tree(temporary)
        if occupied:
            old = target.parent / f"{_prefix(target)}{os.getpid()}-old"
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        else:
            temporary.rename(target)
        atomic_file.fsync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free_space(folder: Path, size: int) -> None:
    """Raise TargetFolderError unless the folder's file system has `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetFolderError(
            f"{folder} has {free / 1e9:.2f} GB left, but {size / 1e9:.2f} GB are needed; free some or write elsewhere"
        )


def _prefix(target: Path) -> str:
    return f".{target.name}.writing-{socket.gethostname()}-"


def _remove_leftovers(target: Path) -> None:
    prefix = _prefix(target)
    for path in list(target.parent.iterdir()):
        process = path.name.removeprefix(prefix).removesuffix("-old")
        if not path.name.startswith(prefix) or not process.isdigit():
            continue
        if process != str(os.getpid()) and Path("/proc", process).exists():  # a killed process may have had our number
            continue
        if path.name.endswith("-old") and not target.exists():
            path.rename(target)  # the process was killed between the two renames
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
