"""Write a folder whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_webrl.util import atomic_file


class TargetFolderError(ValueError):
    """A target folder cannot be written. The message names it."""


@contextmanager
def atomic_folder(target: Path, source: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder next to `target`; rename it to `target` on success, remove it on an exception.

    That of a killed process is removed first. Raises TargetFolderError if the target contains `source`, if another
    process writes it, or if it exists and is not an empty folder, unless `overwrite` is set.
    """
    target, source = target.resolve(), source.resolve()  # a link is kept, the folder behind it replaced
    if source.is_relative_to(target):
        raise TargetFolderError(f"{target} holds the input {source}; choose another folder")
    temporary, old, lock = (target.parent / f".{target.name}.{name}" for name in ("writing", "replaced", "lock"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetFolderError(f"{target.parent} cannot be made: {error}") from error
    try:
        with FileLock(lock, blocking=False):
            occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
            if occupied and not overwrite:
                raise TargetFolderError(
                    f"{target} is not an empty folder; choose another one or pass --overwrite to replace it"
                )
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                yield temporary
                atomic_file.fsync_tree(temporary)
                if occupied:
                    target.rename(old)
                temporary.rename(target)
                atomic_file.fsync(target.parent)
                if occupied:
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
                lock.unlink(missing_ok=True)
    except Timeout:
        raise TargetFolderError(
            f"another process is writing {target}; wait for its end, or choose another folder"
        ) from None


def check_free_space(folder: Path, size: int) -> None:
    """Raise TargetFolderError unless the folder's file system has `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetFolderError(
            f"{folder} has {free / 1e6:.1f} MB left, but {size / 1e6:.1f} MB are needed; free some or write elsewhere"
        )
