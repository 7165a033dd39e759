"""Results of the check: one line for each thing that was looked at, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.util import atomic_file

Status = Literal["passed", "failed", "skipped"]
_STYLES: dict[str, str | None] = {"passed": None, "failed": "bold red", "skipped": "dim"}


@dataclass(frozen=True)
class CheckResult:
    """One thing that was checked."""

    section: str
    name: str
    status: Status
    value: float | str | None = None  # what was measured
    limit: float | str | None = None  # what it is compared with: a bound, or the fastest that is possible
    unit: str = ""  # of value and limit
    note: str = ""  # reason of a failure or an omission

    @property
    def ratio(self) -> float | None:
        """Value by limit, if both are numbers."""
        if isinstance(self.value, int | float) and isinstance(self.limit, int | float) and self.limit:
            return self.value / self.limit
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}

    @classmethod
    def from_json(cls, text: str) -> CheckResult:
        """The result of a line that `to_json` made. Raises ValueError."""
        fields = json.loads(text)
        fields.pop("ratio", None)
        return cls(**fields)


def at_most(section: str, name: str, value: float, limit: float, unit: str = "", note: str = "") -> CheckResult:
    """Passed if `value` is at most `limit`; NaN is not."""
    return CheckResult(section, name, "passed" if value <= limit else "failed", value, limit, unit, note)


def at_least(section: str, name: str, value: float, limit: float, unit: str = "", note: str = "") -> CheckResult:
    """Passed if `value` is at least `limit`; NaN is not."""
    return CheckResult(section, name, "passed" if value >= limit else "failed", value, limit, unit, note)


def measured(section: str, name: str, value: float | str, unit: str = "", limit: float | None = None) -> CheckResult:
    """A measurement that cannot fail; `limit`: the fastest that is possible."""
    return CheckResult(section, name, "passed", value, limit, unit)


def failed(section: str, name: str, note: str) -> CheckResult:
    """A failure without a number."""
    return CheckResult(section, name, "failed", note=note)


def skipped(section: str, name: str, note: str) -> CheckResult:
    """Something that cannot be checked here, with the reason."""
    return CheckResult(section, name, "skipped", note=note)


def print_results(console: Console, results: Sequence[CheckResult]) -> None:
    """Print the table, and the number of results by status."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name, justify in (
        ("section", "left"), ("check", "left"), ("", "left"), ("value", "right"), ("limit", "right"),
        ("ratio", "right"), ("unit", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("note", overflow="fold", ratio=1)
    section = ""
    for each in results:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        fields = (each.name, each.status, _text(each.value), _text(each.limit), ratio, each.unit, each.note)
        table.add_row("" if each.section == section else each.section, *fields, style=_STYLES[each.status])
        section = each.section
    console.print(table)
    console.print(summary_line(results), highlight=False, markup=False)


def summary_line(results: Iterable[CheckResult]) -> str:
    """The number of results by status, and the names of the failed ones."""
    by_status: dict[str, list[CheckResult]] = {status: [] for status in _STYLES}
    for each in results:
        by_status[each.status].append(each)
    counts = ", ".join(f"{len(found)} {status}" for status, found in by_status.items())
    names = "; ".join(f"{each.section}: {each.name}" for each in by_status["failed"])
    return f"{counts}{f': {names}' if names else ''}"


def write_report(path: Path, header: dict[str, Any], results: Sequence[CheckResult]) -> None:
    """Write a JSON file: `header` and all results. Raises OSError."""
    report = {**header, "summary": summary_line(results), "results": [each.to_json() for each in results]}
    atomic_file.write_json(path, report, indent=1)


def _text(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
