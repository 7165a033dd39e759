"""The cost of recording a timeline: microseconds of a span, times the spans of a real job, as a share of its time.

    python -m tools.bench.monitor.timeline_cost [--quick] [--run RUN] [--json FILE]

Runs configs/quickstart.yaml with tracking.timeline for a few updates, unless RUN is the folder of a run that had it.
Then it measures a span, recorded and not, and the writing of the spans, in processor time, on the same machine. The
share is that of the busiest process: its spans times both costs, of the time between its first and its last span.
Each span is charged in full, although its measurement is needed without a timeline too, for the metrics.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_webrl.monitor.timeline import ProcessTimeline, read_timeline
from megatron_webrl.track.timeline import FOLDER, Timeline, TimelineFiles, Track
from tools.arguments import make_bench_parser, write_json
from tools.bench.jobs import run_job

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
UPDATES, QUICK_UPDATES = 6, 1
SPANS, REPEATS = 20_000, 5
GOAL = 0.01  # of a process's time
NO_EVALUATION = tuple(f"evaluation.{name}=false" for name in ("before", "after", "blank_images", "greedy"))


def span_seconds(recording: bool) -> float:
    """Processor seconds of a span as the agent makes it, the least of several rounds."""
    found = []
    for _ in range(REPEATS):
        timeline = Timeline(recording)
        track = Track(timeline, "episode 12.3")
        started = time.process_time()
        for step in range(SPANS):
            with track.span("act", step=step) as span:
                span.facts["kind"] = "left_click"
        found.append((time.process_time() - started) / SPANS)
        timeline.take()
    return min(found)


def writing_seconds() -> tuple[float, float]:
    """Processor seconds that the writing of a span costs, and its bytes, with as many spans as a busy second has."""
    with tempfile.TemporaryDirectory() as name:
        timeline = Timeline(recording=True)
        files = TimelineFiles(Path(name), "rollout-0", 0, timeline)
        spent = 0.0
        for second in range(SPANS // 200):
            for step in range(200):
                timeline.record("act", second, second + 0.5, "episode 12.3", step=step, kind="left_click")
            started = time.process_time()
            files.write()
            spent += time.process_time() - started
        size = sum(path.stat().st_size for path in Path(name).iterdir())
    return spent / SPANS, size / SPANS


def process_figures(process: ProcessTimeline, seconds_per_span: float) -> dict[str, Any]:
    """What the spans of a process cost it."""
    spans = process.spans
    seconds = max(span.end for span in spans) - spans[0].start
    cost = len(spans) * seconds_per_span
    units = {"episode": len(process.named("episode")), "update": len(process.named("update"))}
    return {
        "role": process.role, "spans": len(spans), "seconds": seconds, "cost_seconds": cost, "share": cost / seconds,
        "spans_per": {name: len(spans) / count for name, count in units.items() if count},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table; returns 0 if the goal holds."""
    parser = make_bench_parser(__doc__, quick="one update")
    parser.add_argument("--run", type=Path, metavar="RUN", help="folder of a run that had tracking.timeline")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        updates = QUICK_UPDATES if options.quick else UPDATES
        overrides = (f"trainer.updates={updates}", "tracking.timeline=true", *NO_EVALUATION)
        folder = options.run or run_job(CONFIG, "timeline", overrides, Path(name))
        processes = [each for each in read_timeline(folder) if each.spans]
        size = sum(path.stat().st_size for path in (folder / FOLDER).iterdir())
    on, off = span_seconds(True), span_seconds(False)
    writing, span_bytes = writing_seconds()
    found = [process_figures(each, on + writing) for each in processes]
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(
        f"a span: {1e6 * on:.1f} us recorded, {1e6 * writing:.1f} us to write it, {span_bytes:.0f} bytes; "
        f"{1e6 * off:.1f} us not recorded"
    )
    table = Table()
    for column in ("process", "spans", "an episode", "an update", "s", "ms", "share"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for each in found:
        per = [f"{each['spans_per'][unit]:.0f}" if unit in each["spans_per"] else "" for unit in ("episode", "update")]
        cost = f"{1e3 * each['cost_seconds']:.1f}"
        table.add_row(each["role"], str(each["spans"]), *per, f"{each['seconds']:.0f}", cost, f"{each['share']:.3%}")
    console.print(table)
    share = max(each["share"] for each in found)
    console.print(f"at most {share:.3%} of a process's time (goal: below {GOAL:.0%}); the files have {size:,} bytes")
    figures = {
        "span_us": 1e6 * on, "span_off_us": 1e6 * off, "write_us": 1e6 * writing, "span_bytes": span_bytes,
        "processes": found, "share": share, "bytes": size, "passed": share < GOAL,
    }  # fmt: skip
    write_json(options.json, figures)
    return 0 if share < GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
