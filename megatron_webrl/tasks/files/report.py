"""What is in a task file: counts, duplicates, rows that do not fit. For `webrl tasks check`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_webrl.tasks.files.reading import open_lines, scan
from megatron_webrl.tasks.files.rows import FieldMap
from megatron_webrl.types import DIFFICULTIES, Task
from megatron_webrl.util.text import count_noun, shorten

SHOWN_FAULTS = 20
SHOWN_NAMES = 20  # domains, and benchmarks, that the tables show
_INSTRUCTION_CHARACTERS = 60


@dataclass
class FileReport:
    """Counts of one file."""

    file: str
    tasks: int = 0
    difficulties: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DIFFICULTIES, 0)))
    domains: Counter[str] = field(default_factory=Counter)
    benchmarks: Counter[str] = field(default_factory=Counter)
    websites: set[str] = field(default_factory=set)
    facts: int = 0
    with_answer: int = 0
    other_difficulty: int = 0  # tasks whose difficulty is a number, but not that of their facts: no fault
    duplicates: list[str] = field(default_factory=list)  # messages: same instruction on the same website
    invalid: list[str] = field(default_factory=list)  # messages

    @property
    def faulty(self) -> bool:
        """Whether the file has duplicates, invalid rows or no tasks."""
        return bool(self.duplicates or self.invalid) or not self.tasks

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
        return vars(self) | {
            "domains": dict(self.domains.most_common()),
            "benchmarks": dict(self.benchmarks.most_common()),
            "websites": len(self.websites),
            "duplicates": {"count": len(self.duplicates), "messages": self.duplicates[:SHOWN_FAULTS]},
            "invalid": {"count": len(self.invalid), "messages": self.invalid[:SHOWN_FAULTS]},
        }


def inspect_file(name: str, setting: str, fields: FieldMap) -> FileReport:
    """Read all rows of a file. Raises ConfigError for an unreadable file, which `setting` names."""
    report = FileReport(name)
    lines: dict[tuple[str, str | None], int] = {}
    with open_lines(name, setting, fields) as file:
        for number, _, _, _, task, error in scan(file, name, fields):
            if task is None:
                report.invalid.append(error)
                continue
            report.add(task)
            first = lines.setdefault((task.website, task.instruction), number)
            if first != number:
                instruction = shorten(task.instruction or "", _INSTRUCTION_CHARACTERS)
                report.duplicates.append(f"{name}:{number}: the task of line {first} again: {instruction}")
    return report


def render(report: FileReport) -> RenderableType:
    """Tables and messages of a report."""
    title = (
        f"{report.file}: {count_noun(report.tasks, 'task')} on {count_noun(len(report.websites), 'website')}, "
        f"{count_noun(report.facts, 'fact')}, {report.with_answer} with a reference answer"
    )
    return Group(
        Text(title, style="bold"),
        _table("difficulty", list(report.difficulties.items()), report.tasks),
        _table("domain", report.domains.most_common(), report.tasks),
        _table("benchmark", report.benchmarks.most_common(), report.tasks),
        _messages("rows that do not fit", report.invalid),
        _messages("duplicates (same instruction and website)", report.duplicates),
        Text(f"tasks whose difficulty is not their number of facts: {report.other_difficulty:,} (no fault)"),
    )


def _table(name: str, counts: list[tuple[str, int]], total: int) -> Table:
    table = Table()
    table.add_column(name, overflow="fold")
    table.add_column("tasks", justify="right")
    table.add_column("share", justify="right")
    if rest := counts[SHOWN_NAMES:]:
        counts = [*counts[:SHOWN_NAMES], (f"{len(rest)} others", sum(count for _, count in rest))]
    for label, count in counts:
        table.add_row(Text(label or "(none)"), f"{count:,}", f"{count / max(1, total):.1%}")
    return table


def _messages(name: str, faults: list[str]) -> RenderableType:
    more = [f"and {len(faults) - SHOWN_FAULTS:,} more"] if len(faults) > SHOWN_FAULTS else []
    text = Text(f"{name}: {len(faults):,}", style="red" if faults else "")
    return text.append("".join(f"\n  {line}" for line in (*faults[:SHOWN_FAULTS], *more)), style="default")
