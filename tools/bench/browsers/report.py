"""Results of the browser benchmark: sections of measurements, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table


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

    @property
    def median(self) -> float:
        """Median of all samples."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile."""
        if len(self.values) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class Section:
    """One comparison: settings, measurements and notes."""

    title: str
    settings: Mapping[str, Any]
    rows: Sequence[Measurement]
    notes: Sequence[str] = ()
    series: Mapping[str, Any] = field(default_factory=dict)  # further data for the plots

    def measurement(self, name: str) -> Measurement:
        """The row with this name. Raises KeyError."""
        return {row.name: row for row in self.rows}[name]

    def to_json(self) -> dict[str, Any]:
        """All fields, with median and quartiles of each row."""
        rows = [asdict(row) | {"median": row.median, "quartiles": row.quartiles} for row in self.rows]
        return asdict(self) | {"rows": rows}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Section:
        """The section of a `to_json` result. Raises KeyError for other content."""
        rows = [
            Measurement(
                row["name"], row["unit"], tuple(row["values"]), tuple(Ratio(**ratio) for ratio in row["ratios"])
            )
            for row in found["rows"]
        ]
        return cls(found["title"], found["settings"], rows, found["notes"], found["series"])


def ratio_to(row: Sequence[float], peer: Sequence[float], against: str, goal: float | None = None) -> Ratio:
    """Ratio of the medians of times or costs: peer / row."""
    return Ratio(against, statistics.median(peer) / statistics.median(row), goal)


def show(console: Console, sections: Mapping[str, Section]) -> None:
    """Print one table of all sections, then their notes."""
    table = Table(
        Column(no_wrap=True), "median", "middle half", "", "n", "ratio", title="Browsers", title_justify="left"
    )
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, section in sections.items():
        table.add_row(f"[bold]{name}: {escape(section.title)}[/bold]")
        for row in section.rows:
            low, high = row.quartiles
            spread = f"{_short(low)} - {_short(high)}" if len(row.values) > 1 else ""
            ratios = "; ".join(str(ratio) for ratio in row.ratios)
            cells = (_short(row.median), spread, row.unit, str(len(row.values)), ratios)
            table.add_row("  " + escape(row.name), *map(escape, cells))
        table.add_section()
    console.print(table)
    for name, section in sections.items():
        settings = ", ".join(f"{key} {value}" for key, value in section.settings.items())
        console.print(f"\n[bold]{name}[/bold]: {escape(settings)}", soft_wrap=True, highlight=False)
        for note in section.notes:
            console.print(f"- {escape(note)}", soft_wrap=True, highlight=False)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
