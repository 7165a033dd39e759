"""Read all rows of a task file in order: tasks, and messages for the lines that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_webrl.tasks.files.conversion import TaskFile
from megatron_webrl.tasks.files.rows import FieldMap, Line, RowError, parse_line, parse_task, read_lines
from megatron_webrl.tasks.sampler.units import task_key
from megatron_webrl.types import Task

_PROGRESS_LINES = 2000


class ScannedLine(NamedTuple):
    """A line, and either its task or what is wrong with it."""

    line: Line
    task: Task | None
    error: str  # the message, with file and line; empty if there is a task


@dataclass
class Faults:
    """Counts messages, and keeps the first ones."""

    kept: int
    count: int = 0
    messages: tuple[str, ...] = ()

    def add(self, message: str) -> None:
        self.count += 1
        if self.count <= self.kept:
            self.messages += (message,)


def scan(file: TaskFile, fields: FieldMap, progress: Callable[[int], None] | None = None) -> Iterator[ScannedLine]:
    """The lines of a file. `progress` gets the bytes read so far, now and then. Raises OSError."""
    lines_by_key: dict[int, int] = {}
    with file.path.open("rb") as data:
        for count, line in enumerate(read_lines(data)):
            if progress is not None and count % _PROGRESS_LINES == 0:
                progress(line.offset)
            try:
                task = parse_task(parse_line(line.data), fields)
                first = lines_by_key.setdefault(task_key(task.id), line.number)
                if first != line.number:
                    [name, *_] = fields.names["id"]
                    raise RowError(f"field {name}: expected an id of its own, found {task.id!r} of line {first} again")
            except RowError as error:
                yield ScannedLine(line, None, f"{file.name}:{line.number}: {error}")
            else:
                yield ScannedLine(line, task, "")
