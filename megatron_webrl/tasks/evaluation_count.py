"""Held-out tasks of an evaluation.

The trainer asks, too: for the sources of this project no package of browsers is imported.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FileTasksConfig, PageTasksConfig


def evaluation_task_indices(config: Config) -> range:
    """Indices of the held-out tasks of an evaluation, without those of evaluation.skip.

    evaluation.episodes tasks of each environment; of task files at most all rows of the test file, and all of them for
    0; a source of an import path decides. Raises ConfigError, also if there is no task.
    """
    tasks = config.tasks
    if isinstance(tasks, FileTasksConfig) and not tasks.from_import_path:
        rows = _count_rows(tasks)
        return _without_skipped(config, lambda episodes: min(episodes or rows, rows))
    if isinstance(tasks, PageTasksConfig):
        return _without_skipped(config, lambda episodes: episodes * len(tasks.environments))
    from megatron_webrl.tasks.import_path import load_source

    source = load_source(tasks)
    try:
        return _without_skipped(config, source.evaluation_tasks)
    finally:
        source.close()


def _without_skipped(config: Config, count: Callable[[int], int]) -> range:
    """`count`: number of tasks of a number of episodes."""
    skip, episodes = config.evaluation.skip, config.evaluation.episodes
    indices = range(count(skip) if skip else 0, count(skip + episodes if episodes else 0))
    if skip and not indices:
        raise ConfigError(f"evaluation.skip={skip} leaves none of the {indices.stop} held-out tasks; lower it")
    if not indices:
        raise ConfigError(f"evaluation.episodes={episodes} is no held-out task of this source; raise it")
    return indices


def _count_rows(tasks: FileTasksConfig) -> int:
    from megatron_webrl.tasks.files.conversion import resolve_task_file
    from megatron_webrl.tasks.files.indexing import open_index
    from megatron_webrl.tasks.files.rows import field_map_of

    fields = field_map_of(tasks)
    return len(open_index(resolve_task_file(tasks.test_file, "tasks.test_file", fields), fields))
