"""Held-out tasks of an evaluation.

The trainer asks, too: for the sources of this project no package of browsers is imported.
"""

from __future__ import annotations

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FileTasksConfig, PageTasksConfig, TasksConfig, task_parts
from megatron_webrl.tasks.files.rows import field_map_of
from megatron_webrl.tasks.files.table import TEST_FILE, load_tasks
from megatron_webrl.tasks.import_path import load_source


def evaluation_task_indices(config: Config) -> range:
    """Indices of the held-out tasks of an evaluation, without those of evaluation.skip.

    evaluation.episodes tasks of each environment; of task files at most all rows of the test file, and all of them for
    0; a source of an import path decides. Of tasks.mix each source has as many tasks as it would have alone, and a task
    file evaluation.episodes. Raises ConfigError, also if there is no task.
    """
    skip, episodes = config.evaluation.skip, config.evaluation.episodes
    wanted = skip, skip + episodes if episodes else 0  # episodes before the first index, and before the end
    start = end = 0
    for name, tasks in task_parts(config.tasks).items():
        of_one, before, all_of_it = _held_out_tasks(tasks, 1, *wanted)
        if name and all_of_it < of_one * wanted[1]:
            raise ConfigError(
                f"evaluation.skip + evaluation.episodes is {wanted[1]}, but {name} of tasks.mix has {all_of_it} "
                "held-out tasks; lower these"
            )
        start, end = start + before, end + all_of_it
    indices = range(start if skip else 0, end)
    if skip and not indices:
        raise ConfigError(f"evaluation.skip={skip} leaves none of the {end} held-out tasks; lower it")
    if not indices:
        raise ConfigError(f"evaluation.episodes={episodes} is no held-out task of this source; raise it")
    return indices


def _held_out_tasks(tasks: TasksConfig, *counts: int) -> list[int]:
    """How many held-out tasks a source has for each of several values of evaluation.episodes. Raises ConfigError."""
    if isinstance(tasks, FileTasksConfig) and not tasks.from_import_path:
        rows = len(load_tasks(tasks.test_file, TEST_FILE, field_map_of(tasks)))
        return [min(count or rows, rows) for count in counts]
    if isinstance(tasks, PageTasksConfig):
        return [count * len(tasks.environments) for count in counts]
    source = load_source(tasks)
    try:
        return [source.evaluation_tasks(count) for count in counts]
    finally:
        source.close()
