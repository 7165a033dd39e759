"""Checkpoint folders on disk: names, the newest complete one, commit, deletion.

    checkpoints/latest                     name of the newest complete checkpoint
    checkpoints/version-000005/            complete; its files never change
    checkpoints/version-000005.1/          the same version saved again after a resume
    checkpoints/.staging-000003/           of the newest launch:
        000006/                            in progress, or left by a crash
        deleting-version-000004/           an obsolete one that is deleted

A folder gets its final name once all its bytes are on disk, and `latest` is updated after that: a crash at any moment
leaves `latest` naming a complete folder. `latest` never goes back: every rename starts in the staging folder, which the
next launch moves away (track/run_lock.py), and a commit refuses a version below that of `latest`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint, version_and_copy
from megatron_webrl.util import atomic_file


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written. The message is one line."""


def latest_checkpoint(run_folder: Path) -> Path:
    """The newest complete checkpoint of a run. Raises CheckpointError."""
    checkpoint = find_latest_checkpoint(run_folder)
    if checkpoint is None:
        raise CheckpointError(f"{run_folder / 'checkpoints'} holds no complete checkpoint; set run.resume=false")
    if not (checkpoint / "state.json").is_file():
        raise CheckpointError(
            f"{checkpoint}, which {checkpoint.parent / 'latest'} names, holds no state.json; write the name of a "
            "complete checkpoint into that file, or set run.resume=false"
        )
    return checkpoint


def temporary_folder(staging: Path, version: int) -> Path:
    """The folder into which a checkpoint is written before it is committed."""
    return staging / f"{version:06d}"


def make_empty_folder(temporary: Path) -> Path:
    """Create a folder whose parent exists, deleting an older one; returns it."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    (temporary / "megatron").mkdir()
    return temporary


def version_folder(folder: Path, version: int, copy: int = 0) -> Path:
    """The final folder of a checkpoint; `copy` counts earlier checkpoints of the same version."""
    return folder / (f"version-{version:06d}" + (f".{copy}" if copy else ""))


def commit(temporary: Path, version: int) -> Path:
    """Rename a complete folder to its final name and point `latest` to it; returns it. Its files must be on disk.

    Raises OSError, and CheckpointError if `latest` names a newer checkpoint.
    """
    staging, folder = temporary.parent, temporary.parent.parent
    newest = find_latest_checkpoint(folder.parent)
    newest_version, newest_copy = (newest and version_and_copy(newest)) or (-1, 0)
    if newest is not None and newest_version > version:
        raise CheckpointError(f"{folder / 'latest'} names {newest.name}, which is newer than version {version}")
    copy = newest_copy + 1 if newest_version == version else 0
    target = version_folder(folder, version, copy)
    while target.exists():  # replacing the folder that `latest` names would take two steps
        copy += 1
        target = version_folder(folder, version, copy)
    atomic_file.publish(temporary, target)
    with atomic_file.replacing(folder / "latest", folder=staging) as pointer:
        pointer.write(target.name.encode())
    return target


def obsolete_checkpoints(newest: Path, keep: int, keep_every: int) -> list[Path]:
    """Complete checkpoints to delete: all but the last `keep` versions and the multiples of `keep_every`.

    Only the last copy of a version is kept. Versions above `newest` stay: a user pointed `latest` to an older one.
    """
    found = {key: path for path in newest.parent.iterdir() if (key := version_and_copy(path)) is not None}
    newest_key = version_and_copy(newest)
    assert newest_key is not None
    newest_version = newest_key[0]
    versions = sorted({version for version, _ in found if version <= newest_version}, reverse=True)
    kept = set(versions[:keep]) | {version for version in versions if keep_every and version % keep_every == 0}
    last_copy = {version: max(copy for v, copy in found if v == version) for version in versions}
    return [
        path
        for (version, copy), path in sorted(found.items())
        if version <= newest_version and path != newest and (version not in kept or copy != last_copy[version])
    ]


def delete_checkpoints(paths: list[Path], staging: Path) -> None:
    """Delete checkpoints. Each is renamed first, so that a partly deleted one is never taken for a checkpoint."""
    for path in paths:
        doomed = staging / f"deleting-{path.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def delete_leftovers(staging: Path) -> list[str]:
    """Delete what a crash left half written or half deleted in the staging folder; returns the names."""
    left = sorted(staging.iterdir())
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [path.name for path in left]
