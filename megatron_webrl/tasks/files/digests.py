"""Digests of the task files of a configuration, which must be the same on all nodes of a job, and when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_webrl.config.tasks import FileTasksConfig, TasksConfig
from megatron_webrl.tasks.files.conversion import resolve_task_file
from megatron_webrl.tasks.files.indexing import open_index
from megatron_webrl.tasks.files.rows import field_map_of

TASK_FILES = "tasks/files"  # fact of the control service: the trainer's FileDigest by setting
TRAIN_FILE, TEST_FILE = "tasks.train_file", "tasks.test_file"


class FileDigest(NamedTuple):
    """A task file of one process."""

    path: str  # as the configuration gives it
    digest: str  # of the rows, and of the fields that are read of them


def task_file_digests(tasks: TasksConfig) -> dict[str, FileDigest]:
    """The digest of each task file by its setting; empty for other sources. Raises ConfigError."""
    if not isinstance(tasks, FileTasksConfig) or tasks.from_import_path:
        return {}
    paths, fields = {TRAIN_FILE: tasks.train_file, TEST_FILE: tasks.test_file}, field_map_of(tasks)
    return {
        setting: FileDigest(path, open_index(resolve_task_file(path, setting, fields), fields).digest)
        for setting, path in paths.items()
        if path
    }


def difference_between_nodes(trainers: Mapping[str, Any], files: Mapping[str, FileDigest], role: str) -> str | None:
    """What is wrong if a file of a role has other rows than the trainer's, which are JSON values; else None."""
    for setting, (path, digest) in files.items():
        expected = FileDigest(*trainers[setting]) if setting in trainers else None
        if expected is not None and expected.digest != digest:
            return (
                f"{setting}={path} of {role} has the digest {digest}, but {expected.path} of trainer-0 has "
                f"{expected.digest}; copy one file to all nodes"
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
