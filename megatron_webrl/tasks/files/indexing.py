"""Open the index of a task file; write it first if there is none, or the file has changed since."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.files import index
from megatron_webrl.tasks.files.conversion import TaskFile
from megatron_webrl.tasks.files.index import Fingerprint, TaskIndex, read_index, website_key, write_index
from megatron_webrl.tasks.files.rows import FieldMap, Line, is_public
from megatron_webrl.tasks.files.scan import Faults, scan
from megatron_webrl.tasks.sampler.units import task_key
from megatron_webrl.types import DIFFICULTIES, Task
from megatron_webrl.util import atomic_file
from megatron_webrl.util.text import count_noun

log = logging.getLogger(__name__)

SHOWN_FAULTS = 10
MAX_DOMAINS = 100  # with more, tasks have one environment: names of domains are names of metrics
_BAR_BYTES = 2**20  # size from which on indexing shows a progress bar


class InvalidRows(ConfigError):
    """A task file with rows that do not fit. The message has a line for each of the first ones."""


@dataclass
class _Content:
    """What the index holds of the rows read so far."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("i"))
    lines: array[int] = field(default_factory=lambda: array("i"))
    levels: array[int] = field(default_factory=lambda: array("B"))
    website_ids: array[int] = field(default_factory=lambda: array("i"))  # in order of appearance
    task_keys: array[int] = field(default_factory=lambda: array("Q"))
    websites: dict[str, int] = field(default_factory=dict)
    domains: set[str] = field(default_factory=set)
    rows: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    def add(self, line: Line, task: Task) -> None:
        self.offsets.append(line.offset)
        self.lengths.append(len(line.data))
        self.lines.append(line.number)
        self.rows.update(line.data + b"\n")
        self.levels.append(DIFFICULTIES.index(task.difficulty))
        self.website_ids.append(self.websites.setdefault(task.website, len(self.websites)))
        self.task_keys.append(task_key(task.id))
        if len(self.domains) <= MAX_DOMAINS:
            self.domains.add(task.environment)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the index; websites get their ids in ascending order of their keys."""
        names = list(self.websites)
        keys = np.array([website_key(name) for name in names], np.uint64)
        order = np.argsort(keys)
        encoded = [names[number].encode() for number in order]
        ids = np.empty(len(names), np.int32)
        ids[order] = np.arange(len(names), dtype=np.int32)
        return {
            "offsets": np.frombuffer(self.offsets, np.int64),
            "lengths": np.frombuffer(self.lengths, np.int32),
            "lines": np.frombuffer(self.lines, np.int32),
            "levels": np.frombuffer(self.levels, np.uint8),
            "website_ids": ids[np.frombuffer(self.website_ids, np.int32)],
            "task_keys": np.frombuffer(self.task_keys, np.uint64),
            "website_keys": keys[order],
            "website_ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
            "website_names": np.frombuffer(b"".join(encoded), np.uint8),
        }

    def header(self, fields: FieldMap) -> dict[str, Any]:
        public = next((name for name in self.websites if is_public(name)), "")
        domains = sorted(self.domains) if len(self.domains) <= MAX_DOMAINS else []
        local = next((name for name in self.websites if not is_public(name)), "")
        websites = {"public_website": public, "local_website": local}
        digest = f"{self.rows.hexdigest()}-{fields.digest}"
        return {"fields": fields.digest, "digest": digest, "domains": domains, **websites}


def open_index(file: TaskFile, fields: FieldMap) -> TaskIndex:
    """The index of a file, beside it or in the cache folder. Raises ConfigError, and InvalidRows for rows that do not
    fit; then no index is written.
    """
    try:
        if (found := _find(file, fields)) is not None:
            return found
        target = _target(file, fields)
        with index.exclusive(target):
            return _find(file, fields) or _build(file, fields, target)
    except OSError as error:
        raise ConfigError(f"{file.name}: {error.strerror or error} ({error.filename or file.path})") from error


def _candidates(file: TaskFile, fields: FieldMap) -> tuple[Path, Path]:
    """Where the index may be: beside the file, and in the cache folder."""
    name = f"{file.path.name}.{fields.digest}.index"
    in_cache = index.cache_folder() / index.name_in_cache(str(file.path.resolve()), name)
    return file.path.with_name(name), in_cache


def _find(file: TaskFile, fields: FieldMap) -> TaskIndex | None:
    fingerprint = Fingerprint.of(file.path)
    indices = (read_index(path, fingerprint, fields.digest) for path in _candidates(file, fields))
    return next((index for index in indices if index is not None), None)


def _target(file: TaskFile, fields: FieldMap) -> Path:
    beside, in_cache = _candidates(file, fields)
    if os.access(beside.parent, os.W_OK):
        return beside
    index.make_cache_folder()
    return in_cache


def _build(file: TaskFile, fields: FieldMap, target: Path) -> TaskIndex:
    started, fingerprint = time.monotonic(), Fingerprint.of(file.path)
    log.info("indexing %s, %.0f MB", file.name, fingerprint.size / 1e6)
    content, faults = _Content(), Faults(SHOWN_FAULTS)
    with _progress(file.name, fingerprint.size) as progress:
        for line, task, error in scan(file, fields, progress):
            if task is None:
                faults.add(error)
            else:
                content.add(line, task)
    if faults.count:
        raise InvalidRows(_refusal(file, faults, len(content.offsets)))
    if not content.offsets:
        raise ConfigError(f"{file.name} holds no tasks")
    if Fingerprint.of(file.path) != fingerprint:
        raise ConfigError(f"{file.name} changed while it was read; start again when it is complete")
    header = {"file": asdict(fingerprint), **content.header(fields)}
    with atomic_file.replacing(target) as output:
        write_index(output, content.arrays(), header)
    index = read_index(target, fingerprint, fields.digest)
    if index is None:
        raise ConfigError(f"{target} was replaced while it was written; start again")
    log.info("indexed %s: %d tasks in %.1f s", file.name, len(index), time.monotonic() - started)
    return index


def _refusal(file: TaskFile, faults: Faults, good: int) -> str:
    more = faults.count - len(faults.messages)
    lines = [
        f"{file.name}: {faults.count} of {count_noun(faults.count + good, 'row')} do not fit; "
        f"`webrl tasks check` lists more",
        *faults.messages,
        *([f"and {more} more"] if more else []),
    ]
    return "\n".join(lines)


@contextmanager
def _progress(name: str, size: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on a terminal, for files that take a while."""
    if size < _BAR_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    from megatron_webrl.track.tables import progress_bar

    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task(f"indexing {Path(name).name} (MB)", total=-(-size // 10**6))
        yield lambda done: bar.update(task, completed=done // 10**6)
        bar.update(task, completed=-(-size // 10**6))
