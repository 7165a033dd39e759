"""Checkpoint folders on disk: their names, which is the newest complete one, which are no longer wanted.

    checkpoints/latest                     name of the newest complete checkpoint
    checkpoints/version-000005/            complete; its files never change
    checkpoints/version-000005.1/          the same version saved again, after a resume
    checkpoints/.writing-000006/           under way, or left by a crash
    checkpoints/.deleting-version-000004/  no longer wanted

A folder gets its name when all its bytes are on disk, and `latest` names it after that: whatever moment a crash
chooses, `latest` names a complete folder.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_VERSION = re.compile(r"version-(\d{6,})(?:\.(\d+))?")
_LEFTOVERS = (".writing-*", ".deleting-*")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read. The message names the folder."""


def latest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint. Raises CheckpointError."""
    pointer = folder / "latest"
    if not pointer.is_file():
        raise CheckpointError(f"{folder} holds no complete checkpoint")
    target = folder / pointer.read_text().strip()
    if not (target / "state.json").is_file():
        raise CheckpointError(f"{target} is named latest but holds no state.json")
    return target


def temporary_folder(folder: Path, version: int) -> Path:
    """Where the files of a checkpoint are written."""
    return folder / f".writing-{version:06d}"


def make_empty_folder(temporary: Path) -> Path:
    """Make a writing folder anew; returns it."""
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "megatron").mkdir(parents=True)
    return temporary


def version_folder(folder: Path, version: int, copy: int = 0) -> Path:
    """The name of a complete checkpoint in the folder of all; `copy`: how often the version was there before."""
    return folder / (f"version-{version:06d}" + (f".{copy}" if copy else ""))


def commit(temporary: Path, version: int) -> Path:
    """Give a complete folder its name and let `latest` name it; returns it. Its files must be on disk already."""
    folder = temporary.parent
    copy = 0
    target = version_folder(folder, version)
    while target.exists():  # what `latest` names is never replaced in place: that takes two steps
        copy += 1
        target = version_folder(folder, version, copy)
    temporary.rename(target)
    fsync(folder)
    pointer = folder / ".latest"
    pointer.write_text(target.name)
    fsync(pointer)
    pointer.replace(folder / "latest")
    fsync(folder)
    return target


def obsolete_checkpoints(newest: Path, keep: int, keep_every: int) -> list[Path]:
    """Complete checkpoints that need not stay beside `newest`: not of the last `keep` versions, no `keep_every`-th.

    Of a version that was saved more than once only the last copy stays. Versions above that of `newest` are not
    touched: they are there only if somebody went back to an older one.
    """
    found = {place: path for path in newest.parent.iterdir() if (place := _place(path)) is not None}
    here = _place(newest)
    assert here is not None
    versions = sorted({version for version, _ in found if version <= here[0]}, reverse=True)
    kept = set(versions[:keep]) | {version for version in versions if keep_every and version % keep_every == 0}
    last_copy = {version: max(copy for v, copy in found if v == version) for version in versions}
    return [
        path
        for (version, copy), path in sorted(found.items())
        if version <= here[0] and path != newest and (version not in kept or copy != last_copy[version])
    ]


def delete_checkpoints(paths: list[Path]) -> None:
    """Delete checkpoints. Each loses its name first, so that half a checkpoint never looks like one."""
    for path in paths:
        doomed = path.with_name(f".deleting-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def delete_leftovers(folder: Path) -> list[str]:
    """Delete what a crash left unfinished; returns the names."""
    left = sorted(path for pattern in _LEFTOVERS for path in folder.glob(pattern))
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def fsync(path: Path) -> None:
    """Have the system put a file's bytes, or a folder's entries, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Have the system put everything below a folder, and the folder itself, on disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            fsync(Path(place, name))
        fsync(Path(place))


def _place(path: Path) -> tuple[int, int] | None:
    """(version, copy) of a complete checkpoint's folder, None for anything else."""
    match = _VERSION.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None
