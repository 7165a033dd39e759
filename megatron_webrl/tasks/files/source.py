"""Tasks of a training file, drawn by a sampler, and of a test file, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FileTasksConfig
from megatron_webrl.tasks.files.conversion import TaskFile, resolve_task_file
from megatron_webrl.tasks.files.index import TaskIndex
from megatron_webrl.tasks.files.indexing import open_index
from megatron_webrl.tasks.files.rows import FieldMap, RowError, field_map_of, is_public, parse_line, parse_task
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.row_sampler import RowSampler
from megatron_webrl.tasks.sampler.units import task_key
from megatron_webrl.tasks.web import ENVIRONMENT_NAME
from megatron_webrl.tasks.web_pages import WebPageSource
from megatron_webrl.types import Task
from megatron_webrl.util.text import count_noun

SHOWN_WEBSITES = 5


class TaskRows:
    """Random access to the tasks of a file: a row is read when it is asked for."""

    def __init__(self, file: TaskFile, fields: FieldMap) -> None:
        """Raises ConfigError."""
        self.file, self._fields = file, fields
        self.index: TaskIndex = open_index(file, fields)
        self._descriptor = os.open(file.path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Task:
        """The task of a row, from 0, with a step limit of 0. Raises ConfigError if the file has changed."""
        data = os.pread(self._descriptor, int(self.index.lengths[row]), int(self.index.offsets[row]))
        try:
            task = parse_task(parse_line(data), self._fields)
        except RowError as error:
            raise self._changed(row, str(error)) from None
        if task_key(task.id) != self.index.task_keys[row]:
            raise self._changed(row, f"the task is {task.id!r}")
        return task

    def close(self) -> None:
        os.close(self._descriptor)

    def _changed(self, row: int, found: str) -> ConfigError:
        line = int(self.index.lines[row])
        return ConfigError(f"{self.file.name}:{line}: the file changed while it was in use ({found}); start again")


class FileTaskSource(WebPageSource):
    """The tasks of tasks.train_file and tasks.test_file; either may be missing."""

    def __init__(self, tasks: FileTasksConfig) -> None:
        """Raises ConfigError for a file that cannot be read, for rows that do not fit, and for shared websites."""
        super().__init__(tasks)
        fields = field_map_of(tasks)
        self.training = _open(tasks.train_file, "tasks.train_file", fields)
        self.test = _open(tasks.test_file, "tasks.test_file", fields)
        opened = [rows for rows in (self.training, self.test) if rows is not None]
        if not opened:
            raise ConfigError(f"tasks.source={tasks.source} needs tasks.train_file or tasks.test_file")
        if self.training is not None and self.test is not None and not tasks.allow_shared_websites:
            check_websites_apart(self.training, self.test)
        domains = [rows.index.domains for rows in opened]
        self.environments = tuple(sorted({*sum(domains, ())})) if all(domains) else (ENVIRONMENT_NAME,)
        self._by_domain = all(domains)
        self._sampler = None
        if self.training is not None:
            index = self.training.index
            self._sampler = RowSampler(tasks.sampler, index.levels, index.website_ids, index.websites, index.task_keys)

    @property
    def public_website(self) -> str:
        """A website of the files that is in the network; empty if none is."""
        return next((index.public_website for index in self._indices if index.public_website), "")

    @property
    def local_websites(self) -> Iterator[str]:
        """The websites of the files that are under .localhost."""
        for index in self._indices:
            if index.local_website:
                yield from (name for name in index.websites if not is_public(name))

    @property
    def _indices(self) -> list[TaskIndex]:
        return [rows.index for rows in (self.training, self.test) if rows is not None]

    def make_task(self, environment: str, seed: int) -> Task:
        """Row `seed` of the training file, whose environment must be `environment`. Raises ValueError."""
        rows = self._training_rows()
        if not 0 <= seed < len(rows):
            raise ValueError(f"{rows.file.name} has no row {seed}; it has {count_noun(len(rows), 'row')}, from 0")
        task = self._task(rows, seed)
        if task.environment != environment:
            raise ValueError(f"row {seed} of {rows.file.name} is of {task.environment}, not of {environment}")
        return replace(task, max_steps=self.training_steps(task.difficulty, None))

    def training_task(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> Task:
        rows = self._training_rows()
        assert self._sampler is not None
        task = self._task(rows, self._sampler.draw(seed, ticket, knowledge))
        version = None if knowledge is None else knowledge.version
        return replace(task, max_steps=self.training_steps(task.difficulty, version))

    def held_out_task(self, index: int) -> Task:
        """Row `index` of the test file, from 0. Raises ConfigError without a test file, IndexError beyond its end."""
        if self.test is None:
            raise ConfigError("an evaluation needs tasks.test_file, which is empty")
        if not 0 <= index < len(self.test):
            raise IndexError(
                f"{self.test.file.name} has {count_noun(len(self.test), 'row')}; there is no evaluation task {index}"
            )
        task = self._task(self.test, index)
        return replace(task, max_steps=self.evaluation_steps(task.difficulty))

    def evaluation_tasks(self, episodes: int) -> int:
        """`episodes` rows of the test file; all of them for 0 and for more than there are."""
        rows = 0 if self.test is None else len(self.test)
        return min(episodes or rows, rows)

    def close(self) -> None:
        super().close()
        for rows in (self.training, self.test):
            if rows is not None:
                rows.close()

    def _training_rows(self) -> TaskRows:
        if self.training is None:
            raise ConfigError("training needs tasks.train_file, which is empty")
        return self.training

    def _task(self, rows: TaskRows, row: int) -> Task:
        task = replace(rows[row], seed=row)
        return task if self._by_domain else replace(task, environment=ENVIRONMENT_NAME)


def check_websites_apart(training: TaskRows, test: TaskRows) -> None:
    """Raise ConfigError if both files have tasks of one website."""
    shared = training.index.shared_websites(test.index)
    if shared:
        names = ", ".join(shared[:SHOWN_WEBSITES]) + (", ..." if len(shared) > SHOWN_WEBSITES else "")
        raise ConfigError(
            f"tasks.train_file={training.file.name} and tasks.test_file={test.file.name} share "
            f"{count_noun(len(shared), 'website')}: {names}; remove them from one file, or set "
            "tasks.allow_shared_websites=true"
        )


def _open(text: str, setting: str, fields: FieldMap) -> TaskRows | None:
    return TaskRows(resolve_task_file(text, setting, fields), fields) if text else None
