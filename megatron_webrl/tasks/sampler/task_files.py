"""Digests of task files, which must be the same on all nodes of a job, and in a run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

TRAIN_FILE, TEST_FILE = "tasks.train_file", "tasks.test_file"


class FileDigest(NamedTuple):
    """A task file of one process."""

    path: str  # as the configuration gives it
    digest: str  # of the rows, and of the fields that are read of them


def difference_between_nodes(
    published: Mapping[str, Any], files: Mapping[str, FileDigest], role: str, node: int
) -> str | None:
    """What is wrong if a file of a role has other rows than the trainer's, which are JSON values; else None."""
    for setting, (path, digest) in files.items():
        trainers = FileDigest(*published[setting]) if setting in published else None
        if trainers is not None and trainers.digest != digest:
            return (
                f"{setting}={path} of {role} on node {node} has the digest {digest}, but {trainers.path} of trainer-0 "
                f"on node 0 has {trainers.digest}; copy one file to all nodes"
            )
    return None


def difference_from_checkpoint(saved: Mapping[str, Any] | None, files: Mapping[str, FileDigest]) -> str | None:
    """What is wrong if the training file has other rows than that of a checkpoint, whose `task_sampler` is `saved`."""
    before = (saved or {}).get("files", {}).get(TRAIN_FILE)
    if before is None or TRAIN_FILE not in files or FileDigest(*before).digest == files[TRAIN_FILE].digest:
        return None
    path, digest = files[TRAIN_FILE]
    return (
        f"{TRAIN_FILE}={path} has the digest {digest}, but the run was trained on a file of the digest "
        f"{FileDigest(*before).digest}, whose rows its tickets draw; restore that file, or start a new run with "
        "another run.name and the weights of this one (model.checkpoint)"
    )
