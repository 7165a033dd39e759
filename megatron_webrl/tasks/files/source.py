"""Tasks of a training file, drawn by a sampler, and of a test file, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FileTasksConfig
from megatron_webrl.tasks.files.rows import is_public
from megatron_webrl.tasks.files.table import TEST_FILE, TRAIN_FILE, TaskTable, load_task_files
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.row_sampler import RowSampler
from megatron_webrl.tasks.web import ENVIRONMENT_NAME
from megatron_webrl.tasks.web_pages import WebPageSource
from megatron_webrl.types import Task
from megatron_webrl.util.text import count_noun

SHOWN_WEBSITES = 5


class FileTaskSource(WebPageSource):
    """The tasks of tasks.train_file and tasks.test_file; either may be missing."""

    def __init__(self, tasks: FileTasksConfig) -> None:
        """Raises ConfigError for a file that cannot be read, for rows that do not fit, and for shared websites."""
        super().__init__(tasks)
        tables = load_task_files(tasks)
        if not tables:
            raise ConfigError(f"tasks.source={tasks.source} needs tasks.train_file or tasks.test_file")
        self._tables, self._training, self._test = tables.values(), tables.get(TRAIN_FILE), tables.get(TEST_FILE)
        if self._training and self._test and not tasks.allow_shared_websites:
            _check_websites_apart(self._training, self._test)
        self._by_domain = all(table.domains for table in tables.values())
        domains = {name for table in tables.values() for name in table.domains}
        self.environments = tuple(sorted(domains)) if self._by_domain else (ENVIRONMENT_NAME,)
        self._sampler = None
        if rows := self._training:
            self._sampler = RowSampler(tasks.sampler, rows.levels, rows.website_ids, rows.websites, rows.task_keys)

    @property
    def public_website(self) -> str:
        """A website of the files that is in the network; empty if none is."""
        return next((name for table in self._tables for name in table.websites if is_public(name)), "")

    @property
    def local_websites(self) -> Iterator[str]:
        """The websites of the files that are under .localhost."""
        return (name for table in self._tables for name in table.websites if not is_public(name))

    def make_task(self, environment: str, seed: int) -> Task:
        """Row `seed` of the training file, whose environment must be `environment`. Raises ValueError."""
        rows = self._training_rows()
        if not 0 <= seed < len(rows):
            raise ValueError(f"{rows.name} has no row {seed}; it has {count_noun(len(rows), 'row')}, from 0")
        task = self._task(rows, seed)
        if task.environment != environment:
            raise ValueError(f"row {seed} of {rows.name} is of {task.environment}, not of {environment}")
        return replace(task, max_steps=self.training_steps(task.difficulty, None))

    def training_task(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> Task:
        rows = self._training_rows()
        assert self._sampler is not None
        task = self._task(rows, self._sampler.draw(seed, ticket, knowledge))
        version = None if knowledge is None else knowledge.version
        return replace(task, max_steps=self.training_steps(task.difficulty, version))

    def held_out_task(self, index: int) -> Task:
        """Row `index` of the test file, from 0. Raises ConfigError without a test file, IndexError beyond its end."""
        if self._test is None:
            raise ConfigError("an evaluation needs tasks.test_file, which is empty")
        if not 0 <= index < len(self._test):
            raise IndexError(
                f"{self._test.name} has {count_noun(len(self._test), 'row')}; there is no evaluation task {index}"
            )
        task = self._task(self._test, index)
        return replace(task, max_steps=self.evaluation_steps(task.difficulty))

    def evaluation_tasks(self, episodes: int) -> int:
        """`episodes` rows of the test file; all of them for 0 and for more than there are."""
        rows = 0 if self._test is None else len(self._test)
        return min(episodes or rows, rows)

    def _training_rows(self) -> TaskTable:
        if self._training is None:
            raise ConfigError("training needs tasks.train_file, which is empty")
        return self._training

    def _task(self, rows: TaskTable, row: int) -> Task:
        task = replace(rows[row], seed=row)
        return task if self._by_domain else replace(task, environment=ENVIRONMENT_NAME)


def _check_websites_apart(training: TaskTable, test: TaskTable) -> None:
    """Raise ConfigError if both files have tasks of one website."""
    shared = sorted({*training.websites} & {*test.websites})
    if shared:
        names = ", ".join(shared[:SHOWN_WEBSITES]) + (", ..." if len(shared) > SHOWN_WEBSITES else "")
        raise ConfigError(
            f"tasks.train_file={training.name} and tasks.test_file={test.name} share "
            f"{count_noun(len(shared), 'website')}: {names}; remove them from one file, or set "
            "tasks.allow_shared_websites=true"
        )
