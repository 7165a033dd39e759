"""The report of every `webrl check`: one line for each thing that was checked, as a table and as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl import __version__
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util import atomic_file

STYLES = {"passed": None, "failed": "bold red", "skipped": "dim"}


@dataclass(frozen=True)
class CheckResult:
    """One thing that was checked."""

    section: str
    name: str
    status: Literal["passed", "failed", "skipped"]
    value: float | str | None = None  # what was measured
    limit: float | str | None = None  # what it is compared with: a bound, or the fastest that is possible
    unit: str = ""  # of value and limit
    note: str = ""  # reason of a failure or an omission; of a passed line a warning

    @property
    def ratio(self) -> float | None:
        """Value by limit, if both are numbers."""
        if isinstance(self.value, int | float) and isinstance(self.limit, int | float) and self.limit:
            return self.value / self.limit
        return None


@dataclass(frozen=True)
class GpuCheckRequest:
    """Options of `webrl check gpu`."""

    config: Config  # of the machine (cluster.*) and of the job that the section "job" shortens
    platform: str  # "cpu" or "cuda"
    sections: Sequence[str]
    cuda_problem: str = ""  # why torch cannot use the GPUs of this machine; fails the driver, skips GPU_SECTIONS
    timeout_seconds: float | None = None  # of each section; None: its own
    min_link_gib_per_second: float = 0.0  # least speed between two GPUs
    node_reports: Sequence[Path] = ()  # of `webrl check node`
    quick: bool = False  # two random layers in model and job, and a job without checkpoint, kill and evaluation
    job_file: Path | None = None  # to which the section "job" writes its configuration instead of running it
    slurm_job: bool = False  # `config` is such a file, and Slurm runs the job

    @property
    def job_seconds(self) -> float:
        """Limit of the short job: two starts, two checkpoints of 1.5 starts each, and as long as one for the rest."""
        return self.timeout_seconds or 6 * self.config.run.startup_timeout_seconds


class CheckFailed(RuntimeError):
    """A check failed. The message gives the reason and the remedy."""


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


def make_console() -> Console:
    """Standard output, wide enough for the table where it is no terminal."""
    # `srun --unbuffered` gives the output of a step a pseudo-terminal of 80 columns.
    terminal = sys.stdout.isatty() and "SLURM_STEP_ID" not in os.environ
    return Console() if terminal else Console(width=160, force_terminal=False)


def check_report_path(option: str, path: Path | None) -> None:
    """Raises ConfigError for a file that cannot be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option}={path}: the folder {folder} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option}={path} is a folder" if path.is_dir() else f"{option}={path} is not writable")


def report(results: Sequence[CheckResult], path: Path | None = None, meaning: str = "", **header: Any) -> int:
    """Print the table, a summary and, if nothing failed, the `meaning` of a pass; write all to the JSON file `path`.

    Returns 1 if a check failed, or the file cannot be written.
    """
    console, table = make_console(), Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("section", "check", "", "value", "limit", "ratio", "unit", "note"):
        justify: Any = "right" if column in ("value", "limit", "ratio") else "left"
        table.add_column(column, overflow="fold", justify=justify, ratio=1 if column == "note" else None)
    section = ""
    for each in results:
        numbers = (_text(each.value), _text(each.limit), "" if each.ratio is None else f"{each.ratio:.2f}")
        fields = (
            "" if each.section == section else each.section,
            each.name,
            each.status,
            *numbers,
            each.unit,
            each.note,
        )
        table.add_row(*fields, style=STYLES[each.status])
        section = each.section
    console.print(table)
    console.print(summary_line(results), highlight=False, markup=False)
    code, written = int(any(each.status == "failed" for each in results)), f"report: {path}"
    if path is not None:
        try:
            write_json(path, results, meaning=meaning, **header)
        except OSError as error:
            code, written = 1, f"{written} cannot be written: {error}"
        console.print(written, highlight=False, markup=False, soft_wrap=True)
    if meaning and not code:
        console.print(meaning, highlight=False, markup=False, soft_wrap=True)
    return code


def summary_line(results: Sequence[CheckResult]) -> str:
    """The number of results by status, and the names of the failed ones."""
    by_status = Counter[str](each.status for each in results)
    names = "; ".join(f"{each.section}: {each.name}" for each in results if each.status == "failed")
    return ", ".join(f"{by_status[status]} {status}" for status in STYLES) + (f": {names}" if names else "")


def read_results(path: Path) -> list[CheckResult]:
    """The results in a JSON report. Raises OSError, ValueError, KeyError, TypeError for anything else."""
    found = json.loads(path.read_text())["results"]
    return [CheckResult(**{name: value for name, value in each.items() if name != "ratio"}) for each in found]


def write_json(path: Path, results: Sequence[CheckResult], **header: Any) -> None:
    """Write command, time, host and version, `header`, and all results. Raises OSError."""
    content = {
        "command": ["webrl", *sys.argv[1:]],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": os.uname().nodename,
        "version": __version__,
        **header,
        "summary": summary_line(results),
        "results": [asdict(each) | {"ratio": each.ratio} for each in results],
    }
    atomic_file.write_json(path, content, indent=1)


def _text(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
