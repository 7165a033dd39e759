"""The tasks of a task file: what samplers need of all of them in memory, each task read again when it is asked for."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from array import array
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FileTasksConfig, TasksConfig, task_parts
from megatron_webrl.tasks.files.reading import open_lines, scan
from megatron_webrl.tasks.files.rows import FieldMap, RowError, field_map_of, parse_line, parse_task
from megatron_webrl.tasks.sampler.knowledge import task_key
from megatron_webrl.types import DIFFICULTIES, Task
from megatron_webrl.util.text import count_noun

log = logging.getLogger(__name__)

TRAIN_FILE, TEST_FILE = "tasks.train_file", "tasks.test_file"
SHOWN_FAULTS = 10
MAX_DOMAINS = 100  # with more, tasks have one environment: names of domains are names of metrics


class TaskTable:
    """The tasks of one file, by row from 0. It holds 29 bytes a row, and the names of the websites."""

    def __init__(self, file: BinaryIO, name: str, fields: FieldMap) -> None:
        """`name`: as the configuration gives it. Raises ConfigError, with a line for each of the first misfits."""
        self.name, self._file, self._fields = name, file, fields
        offsets, lengths, lines, website_ids = array("q"), array("i"), array("i"), array("i")
        levels, task_keys = array("B"), array("Q")
        websites: dict[str, int] = {}
        domains: set[str] = set()
        faults: list[str] = []
        rows = hashlib.blake2b(digest_size=8)
        for number, offset, data, key, task, error in scan(file, name, fields):
            if task is None:
                faults.append(error)
                continue
            offsets.append(offset)
            lengths.append(len(data))
            lines.append(number)
            levels.append(DIFFICULTIES.index(task.difficulty))
            website_ids.append(websites.setdefault(task.website, len(websites)))
            task_keys.append(key)
            domains.add(task.environment)
            rows.update(data + b"\n")
        if faults:
            more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
            total = count_noun(len(faults) + len(offsets), "row")
            refusal = f"{name}: {len(faults)} of {total} do not fit; `webrl tasks check` lists more"
            raise ConfigError("\n".join([refusal, *faults[:SHOWN_FAULTS], *more]))
        if not offsets:
            raise ConfigError(f"{name} holds no tasks")
        self._offsets, self._lengths, self._lines = offsets, lengths, lines
        self.levels = np.frombuffer(levels, np.uint8)  # [rows] index into DIFFICULTIES
        self.website_ids = np.frombuffer(website_ids, np.int32)  # [rows] index into websites
        self.task_keys = np.frombuffer(task_keys, np.uint64)  # [rows]
        self.websites = list(websites)
        self.domains = sorted(domains) if len(domains) <= MAX_DOMAINS else []  # names of environments
        self.digest = f"{rows.hexdigest()}-{fields.digest}"

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Task:
        """The task of a row, with a step limit of 0. Raises ConfigError if the file has changed."""
        data = os.pread(self._file.fileno(), self._lengths[row], self._offsets[row])
        try:
            task = parse_task(parse_line(data), self._fields)
            if task_key(task.id) != self.task_keys[row]:
                raise RowError(f"the task is {task.id!r}")
        except RowError as error:
            place = f"{self.name}:{self._lines[row]}"
            raise ConfigError(f"{place}: the file changed while it was in use ({error}); start again") from None
        return task


def load_tasks(text: str, setting: str, fields: FieldMap) -> TaskTable:
    """The tasks of what `open_lines` opens; read once in a process, unless the file changes. Raises ConfigError."""
    try:
        status = Path(text).stat()
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError):  # no file
        version = (0, 0, 0)
    return _load(text, setting, fields, version)


@lru_cache(maxsize=4)
def _load(text: str, setting: str, fields: FieldMap, version: tuple[int, int, int]) -> TaskTable:
    started = time.monotonic()
    table = TaskTable(open_lines(text, setting, fields), text, fields)
    log.info("read %s: %d tasks in %.1f s", text, len(table), time.monotonic() - started)
    return table


def load_task_files(tasks: FileTasksConfig) -> dict[str, TaskTable]:
    """The tasks of tasks.train_file and tasks.test_file by setting, without one that is empty. Raises ConfigError."""
    paths, fields = {TRAIN_FILE: tasks.train_file, TEST_FILE: tasks.test_file}, field_map_of(tasks)
    return {setting: load_tasks(path, setting, fields) for setting, path in paths.items() if path}


# Digests of the task files of a configuration, which must be the same on all nodes of a job, and when it resumes.

TASK_FILES = "tasks/files"  # fact of the control service: the trainer's FileDigest by setting


class FileDigest(NamedTuple):
    """A task file of one process."""

    path: str  # as the configuration gives it
    digest: str  # of the rows, and of the fields that are read of them


def task_file_digests(tasks: TasksConfig) -> dict[str, FileDigest]:
    """The digest of each task file by its setting; empty for other sources. Raises ConfigError."""
    found = {}
    for name, part in task_parts(tasks).items():
        if isinstance(part, FileTasksConfig) and not part.from_import_path:
            for setting, table in load_task_files(part).items():
                key = setting.replace("tasks.", f"tasks.mix.{name}.") if name else setting
                found[key] = FileDigest(table.name, table.digest)
    return found


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
    """What is wrong if a training file has other rows than that of a checkpoint, whose `task_sampler` is `saved`."""
    for setting, before in (saved or {}).get("files", {}).items():
        trained = FileDigest(*before)
        path, digest = files.get(setting, trained)
        if setting.endswith(".train_file") and trained.digest != digest:
            return (
                f"{setting}={path} has the digest {digest}, but the run was trained on a file of the digest "
                f"{trained.digest}, whose rows its tickets draw; restore that file, or start a new run with another "
                "run.name and the weights of this one (model.checkpoint)"
            )
    return None
