"""Results of the browser benchmark: sections of measurements, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Ratio:
    """How many times better than another row; `goal` is the minimum."""

    against: str
    value: float
    goal: float | None = None

    def __str__(self) -> str:
        goal = "" if self.goal is None else f" (goal {self.goal:.3g}: {'met' if self.value >= self.goal else 'missed'})"
        return f"{self.value:.2f} x {self.against}{goal}"


@dataclass(frozen=True)
class Measurement:
    """All samples of one quantity."""

    name: str
    unit: str
    values: tuple[float, ...]
    ratios: tuple[Ratio, ...] = ()


@dataclass(frozen=True)
class Section:
    """One comparison: settings, measurements and notes."""

    title: str
    settings: Mapping[str, Any]
    rows: Sequence[Measurement]
    notes: Sequence[str] = ()


def ratio_to(row: Sequence[float], peer: Sequence[float], against: str, goal: float | None = None) -> Ratio:
    """Ratio of the medians of times or costs: peer / row."""
    return Ratio(against, statistics.median(peer) / statistics.median(row), goal)


def show(console: Console, section: Section) -> None:
    """Print a section."""
    table = Table(title=section.title, title_justify="left")
    for column in ("", "median", "middle half", "", "n", "ratio"):
        table.add_column(column, justify="right" if column in ("median", "middle half", "n") else "left")
    for row in section.rows:
        low, _, high = statistics.quantiles(row.values, n=4, method="inclusive") if len(row.values) > 1 else ("",) * 3
        spread = f"{low:.3g} - {high:.3g}" if len(row.values) > 1 else ""
        median = f"{statistics.median(row.values):.3g}"
        table.add_row(row.name, median, spread, row.unit, str(len(row.values)), "; ".join(map(str, row.ratios)))
    console.print(table)
    settings = ", ".join(f"{key} {value}" for key, value in section.settings.items())
    for note in (settings, *section.notes):
        console.print(f"- {escape(note)}", soft_wrap=True, highlight=False)
