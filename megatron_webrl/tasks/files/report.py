"""What is in a task file: counts, duplicates, rows that do not fit. For `webrl tasks check`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.files.conversion import TaskFile
from megatron_webrl.tasks.files.rows import FieldMap
from megatron_webrl.tasks.files.scan import Faults, scan
from megatron_webrl.types import DIFFICULTIES, Task
from megatron_webrl.util.text import count_noun, first_line, shorten

SHOWN_FAULTS = 20
SHOWN_NAMES = 20  # domains, and benchmarks, that the tables show
_INSTRUCTION_CHARACTERS = 60


@dataclass
class FileReport:
    """Counts of one file."""

    name: str
    tasks: int = 0
    difficulties: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)
    benchmarks: Counter[str] = field(default_factory=Counter)
    websites: set[str] = field(default_factory=set)
    facts: int = 0
    with_answer: int = 0
    other_difficulty: int = 0  # tasks whose difficulty is a number, but not that of their facts: no fault
    duplicates: Faults = field(default_factory=lambda: Faults(SHOWN_FAULTS))  # same instruction on the same website
    invalid: Faults = field(default_factory=lambda: Faults(SHOWN_FAULTS))

    @property
    def faulty(self) -> bool:
        """Whether the file has duplicates, invalid rows or no tasks."""
        return bool(self.duplicates.count or self.invalid.count) or not self.tasks

    def add(self, task: Task) -> None:
        """Count a task."""
        self.tasks += 1
        self.difficulties[task.difficulty] += 1
        self.domains[task.domain] += 1
        self.benchmarks[task.benchmark] += 1
        self.websites.add(task.website)
        self.facts += len(task.facts)
        self.with_answer += task.answer is not None
        self.other_difficulty += bool(task.fact_count and task.facts) and task.fact_count != len(task.facts)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "file": self.name,
            "tasks": self.tasks,
            "difficulties": {name: self.difficulties[name] for name in DIFFICULTIES},
            "domains": dict(self.domains.most_common()),
            "benchmarks": dict(self.benchmarks.most_common()),
            "websites": len(self.websites),
            "facts": self.facts,
            "with_answer": self.with_answer,
            "other_difficulty": self.other_difficulty,
            "duplicates": {"count": self.duplicates.count, "messages": list(self.duplicates.messages)},
            "invalid": {"count": self.invalid.count, "messages": list(self.invalid.messages)},
        }


def inspect_file(file: TaskFile, fields: FieldMap, progress: Callable[[int], None] | None = None) -> FileReport:
    """Read all rows of a file. `progress` gets the bytes read so far. Raises ConfigError for an unreadable file."""
    report = FileReport(file.name)
    lines: dict[bytes, int] = {}
    try:
        for line, task, error in scan(file, fields, progress):
            if task is None:
                report.invalid.add(error)
                continue
            report.add(task)
            content = f"{task.website}\0{task.instruction}".encode()
            first = lines.setdefault(hashlib.blake2b(content, digest_size=16).digest(), line.number)
            if first != line.number:
                instruction = shorten(task.instruction or "", _INSTRUCTION_CHARACTERS)
                report.duplicates.add(f"{file.name}:{line.number}: the task of line {first} again: {instruction}")
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read: {first_line(error)}") from error
    return report


def render(report: FileReport) -> RenderableType:
    """Tables and messages of a report."""
    title = (
        f"{report.name}: {count_noun(report.tasks, 'task')} on {count_noun(len(report.websites), 'website')}, "
        f"{count_noun(report.facts, 'fact')}, {report.with_answer} with a reference answer"
    )
    difficulties = [(name, report.difficulties[name]) for name in DIFFICULTIES]
    return Group(
        Text(title, style="bold"),
        _table("difficulty", difficulties, report.tasks),
        _table("domain", report.domains.most_common(), report.tasks),
        _table("benchmark", report.benchmarks.most_common(), report.tasks),
        _messages("rows that do not fit", report.invalid),
        _messages("duplicates (same instruction and website)", report.duplicates),
        Text(f"tasks whose difficulty is not their number of facts: {report.other_difficulty:,} (no fault)"),
    )


def _table(name: str, counts: Iterable[tuple[str, int]], total: int) -> Table:
    table = Table()
    table.add_column(name, overflow="fold")
    table.add_column("tasks", justify="right")
    table.add_column("share", justify="right")
    rows = list(counts)
    for label, count in rows[:SHOWN_NAMES]:
        table.add_row(Text(label or "(none)"), f"{count:,}", f"{count / max(1, total):.1%}")
    if rest := [count for _, count in rows[SHOWN_NAMES:]]:
        table.add_row(f"{len(rest)} others", f"{sum(rest):,}", f"{sum(rest) / max(1, total):.1%}")
    return table


def _messages(name: str, faults: Faults) -> RenderableType:
    text = Text(f"{name}: {faults.count:,}", style="red" if faults.count else "")
    for message in faults.messages:
        text.append(f"\n  {message}", style="default")
    if faults.count > len(faults.messages):
        text.append(f"\n  and {faults.count - len(faults.messages):,} more", style="default")
    return text
