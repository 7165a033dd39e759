"""Held-out tasks of an evaluation.

The trainer asks, too: for the sources of this project no package of browsers is imported.
"""

from __future__ import annotations

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FileTasksConfig, PageTasksConfig
from megatron_webrl.tasks.files.rows import field_map_of
from megatron_webrl.tasks.files.table import TEST_FILE, load_tasks
from megatron_webrl.tasks.import_path import load_source


def evaluation_task_indices(config: Config) -> range:
    """Indices of the held-out tasks of an evaluation, without those of evaluation.skip.

    evaluation.episodes tasks of each environment; of task files at most all rows of the test file, and all of them for
    0; a source of an import path decides. Raises ConfigError, also if there is no task.
    """
    tasks, skip, episodes = config.tasks, config.evaluation.skip, config.evaluation.episodes
    wanted = skip, skip + episodes if episodes else 0  # episodes before the first index, and before the end
    if isinstance(tasks, FileTasksConfig) and not tasks.from_import_path:
        rows = len(load_tasks(tasks.test_file, TEST_FILE, field_map_of(tasks)))
        start, end = (min(count or rows, rows) for count in wanted)
    elif isinstance(tasks, PageTasksConfig):
        start, end = (count * len(tasks.environments) for count in wanted)
    else:
        source = load_source(tasks)
        try:
            start, end = map(source.evaluation_tasks, wanted)
        finally:
            source.close()
    indices = range(start if skip else 0, end)
    if skip and not indices:
        raise ConfigError(f"evaluation.skip={skip} leaves none of the {end} held-out tasks; lower it")
    if not indices:
        raise ConfigError(f"evaluation.episodes={episodes} is no held-out task of this source; raise it")
    return indices
