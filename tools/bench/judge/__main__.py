"""Judging with faults, and what judging costs training.

    python -m tools.bench.judge [--quick] [--json FILE]

First an endpoint answers 30 % of requests with faults, of every kind equally often; no verdict may be wrong or
missing. Then agents work beside an endpoint with 2 s latency; the table says by which share of its time judging holds
training up. Exit code 1: a verdict was wrong or missing, or training was held up by 1 % or more (not with --quick,
which is too short for that figure).
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_webrl.track.tables import progress_bar
from tools.arguments import make_bench_parser, write_json
from tools.bench.judge.correctness import CorrectnessResult, measure_correctness
from tools.bench.judge.throughput import ThroughputResult, ThroughputSize, measure_throughput

FAULTS, GOAL = "0.3", 0.01
FULL_EPISODES = {"schema": 1000, "line": 300}  # by the form of replies
QUICK_EPISODES = {"schema": 48, "line": 48}
SCREENSHOTS = 4
FULL = ThroughputSize(agents=64, group_size=8, episode_seconds=40.0, latency=2.0, screenshots=11, seconds=240.0)
QUICK = ThroughputSize(agents=16, group_size=4, episode_seconds=0.4, latency=0.05, screenshots=4, seconds=2.0)


def measure(quick: bool, console: Console) -> tuple[dict[str, CorrectnessResult], ThroughputResult]:
    """Both parts. Raises RuntimeError."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as folder:
        for structured, episodes in (QUICK_EPISODES if quick else FULL_EPISODES).items():
            found[structured] = _correctness(Path(folder), structured, episodes, console)
        throughput = measure_throughput(Path(folder), QUICK if quick else FULL, console.print)
    return found, throughput


def _correctness(folder: Path, structured: str, episodes: int, console: Console) -> CorrectnessResult:
    with progress_bar(console) as bar:
        task = bar.add_task(f"episodes, {structured}", total=episodes)
        return measure_correctness(
            folder, episodes, SCREENSHOTS, FAULTS, structured, lambda done: bar.update(task, completed=done)
        )


def show(found: dict[str, CorrectnessResult], throughput: ThroughputResult, console: Console) -> None:
    """Print one table."""
    table = Table(title="The judge", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, result in found.items():
        faults: Counter[str] = Counter()
        for reason, count in result.masked.items():  # stage: last fault
            faults[reason.rpartition(": ")[2]] += count
        masks = ", ".join(f"{fault} {count}" for fault, count in sorted(faults.items())) or "none"
        table.add_section()
        table.add_row(f"{name}: episodes judged, faulty requests", f"{result.episodes}, {result.fault_rate:.0%}")
        table.add_row(f"{name}: right / wrong / lost", f"{result.right} / {result.wrong} / {result.lost}")
        table.add_row(f"{name}: masked, by last fault", masks)
    table.add_section()
    table.add_row("episodes an hour", f"{throughput.episodes_per_hour:.0f}")
    table.add_row("requests a second, most in flight",
                  f"{throughput.requests_per_second:.1f}, {throughput.most_in_flight}")  # fmt: skip
    table.add_row("verdict after the last action, mean", f"{throughput.lag_seconds:.1f} s")
    table.add_row("training held up by growing lag", f"{throughput.lag_growth:.2%}")
    table.add_row("training held up by slower agents", f"{throughput.agents_slowed:.2%}")
    table.add_row("slowness of agents without judging", f"{throughput.slow_without:.2%}")
    table.add_row(f"training held up (goal: under {GOAL:.0%})", f"{throughput.held_up:.2%}")
    table.add_row("had agents waited for verdicts", f"{throughput.if_agents_waited:.0%}")
    console.print(table)


def main() -> int:
    """Command line."""
    options = make_bench_parser(__doc__, "a few episodes, short latencies").parse_args()
    console = Console()
    found, throughput = measure(options.quick, console)
    show(found, throughput, console)
    figures = {"correctness": {name: asdict(result) for name, result in found.items()}}
    write_json(options.json, figures | {"throughput": asdict(throughput)})
    return int(missed_a_goal(found, throughput, options.quick))


def missed_a_goal(found: Mapping[str, CorrectnessResult], throughput: ThroughputResult, quick: bool) -> bool:
    """Whether a verdict was wrong or missing, or judging held training up; the latter is not asked of a quick run."""
    held_up = not quick and throughput.held_up >= GOAL
    return held_up or any(result.wrong or result.lost for result in found.values())


if __name__ == "__main__":
    sys.exit(main())
