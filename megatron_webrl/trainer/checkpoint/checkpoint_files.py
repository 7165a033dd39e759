"""Checkpoint folders on disk: names, the newest complete one, commit, deletion, and what a resume needs. Without torch.

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

import json
import shutil
from itertools import count
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.config.trainer import TrainerConfig
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


def commit(temporary: Path, version: int) -> Path:
    """Rename a complete folder to its final name and point `latest` to it; returns it. Its files must be on disk.

    Raises OSError, and CheckpointError if `latest` names a newer checkpoint.
    """
    staging, folder = temporary.parent, temporary.parent.parent
    newest = find_latest_checkpoint(folder.parent)
    newest_version, newest_copy = (newest and version_and_copy(newest)) or (-1, 0)
    if newest is not None and newest_version > version:
        raise CheckpointError(f"{folder / 'latest'} names {newest.name}, which is newer than version {version}")
    # A new name for each copy: replacing the folder that `latest` names would take two steps.
    copies = count(newest_copy + 1 if newest_version == version else 0)
    names = (f"version-{version:06d}" + (f".{copy}" if copy else "") for copy in copies)
    target = next(folder / name for name in names if not (folder / name).exists())
    atomic_file.publish(temporary, target)
    with atomic_file.replacing(folder / "latest", folder=staging) as pointer:
        pointer.write(target.name.encode())
    return target


def obsolete_checkpoints(newest: Path, keep: int) -> list[Path]:
    """Complete checkpoints to delete: all but the last `keep` versions.

    Only the last copy of a version is kept. Versions above `newest` stay: a user pointed `latest` to an older one.
    """
    found = {key: path for path in newest.parent.iterdir() if (key := version_and_copy(path)) is not None}
    newest_key = version_and_copy(newest)
    assert newest_key is not None
    last_copy = {version: copy for version, copy in sorted(found) if version <= newest_key[0]}
    kept = {version: last_copy[version] for version in sorted(last_copy)[-keep:]}
    return [
        path
        for (version, copy), path in sorted(found.items())
        if version <= newest_key[0] and path != newest and kept.get(version) != copy
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


def needs_initial_weights(config: Config) -> bool:
    """Whether a start reads model.checkpoint or the weights of model.path.

    A resumed one needs them only as the reference of the KL penalty, unless a warm start has stored that.
    """
    if not config.run.resume:
        return True
    return config.trainer.loss.kl_coefficient > 0 and not config.reference_weights_folder.exists()


def check_resumable(checkpoint: Path, trainer: TrainerConfig) -> None:
    """Raises CheckpointError if a setting has another value than the checkpoint needs, as its state.json says."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if state.get("optimizer_shards") == "ranks":
        layout = {
            "tensor": trainer.tensor_parallel,
            "pipeline": trainer.pipeline_parallel,
            "virtual_pipeline": trainer.virtual_pipeline,
            "context": trainer.context_parallel,
            "expert": trainer.expert_parallel,
            "expert_tensor": trainer.expert_tensor_parallel,
        }
        for name, size in layout.items():
            if state["layout"][name] != size:
                raise CheckpointError(
                    f"{checkpoint} was saved with trainer.checkpoint.optimizer_shards=ranks and {name} size "
                    f"{state['layout'][name]}, not {size}: resume with the same sizes and any number of replicas, or "
                    "start a run from its weights (model.checkpoint)"
                )
    if state.get("has_critic") not in (None, trainer.critic is not None):
        has = "has a critic" if state["has_critic"] else "has no critic"
        raise CheckpointError(
            f"{checkpoint} {has}, but trainer.advantage.name={trainer.advantage.name}; a run has a critic "
            "(trainer.advantage.name=critic) from its start or not at all: leave it as it was, or start another run "
            "from the weights (model.checkpoint)"
        )
