"""Digests of the task files that a configuration names."""

from __future__ import annotations

from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.files.conversion import resolve_task_file
from megatron_webrl.tasks.files.field_map import field_map_of
from megatron_webrl.tasks.files.indexing import open_index
from megatron_webrl.tasks.sampler.task_files import TEST_FILE, TRAIN_FILE, FileDigest


def task_file_digests(tasks: TasksConfig) -> dict[str, FileDigest]:
    """The digest of each task file by its setting; empty for other sources. Raises ConfigError."""
    paths = {TRAIN_FILE: tasks.train_file, TEST_FILE: tasks.test_file} if tasks.from_files else {}
    fields = field_map_of(tasks) if paths else None
    return {
        setting: FileDigest(path, open_index(resolve_task_file(path, setting, fields), fields).digest)
        for setting, path in paths.items()
        if path and fields is not None
    }
