"""Number of tasks of an evaluation.

The trainer asks, too: for the sources of this project no package of browsers is imported.
"""

from __future__ import annotations

from megatron_webrl.config.schema import Config


def count_evaluation_tasks(config: Config) -> int:
    """evaluation.episodes for each environment; of task files at most all rows of the test file, and all of them for 0;
    a source of an import path decides. Raises ConfigError.
    """
    tasks, episodes = config.tasks, config.evaluation.episodes
    if tasks.from_files:
        return _count_rows(config)
    if not tasks.from_import_path:
        return episodes * len(tasks.environments)
    from megatron_webrl.tasks.import_path import load_source

    source = load_source(tasks)
    try:
        return source.evaluation_tasks(episodes)
    finally:
        source.close()


def _count_rows(config: Config) -> int:
    from megatron_webrl.tasks.files.conversion import resolve_task_file
    from megatron_webrl.tasks.files.field_map import field_map_of
    from megatron_webrl.tasks.files.indexing import open_index

    fields = field_map_of(config.tasks)
    rows = len(open_index(resolve_task_file(config.tasks.test_file, "tasks.test_file", fields), fields))
    return min(config.evaluation.episodes or rows, rows)
