"""The command line of `webrl timeline`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError

WIDTH = 100  # of output that does not go to a terminal


def add_timeline(commands: Any) -> None:
    """Add `webrl timeline` to the parser."""
    timeline = commands.add_parser(
        "timeline",
        help="what bounded an update, and a trace of all processes",
        description="Explain an update of a run with tracking.timeline: its critical path, what idled, and what one "
        "more engine or trainer would give; write a trace for ui.perfetto.dev or chrome://tracing. Read-only. "
        "docs/timeline.md",
        epilog="example: webrl timeline quickstart --update 12 --output update-12.json.gz",
    )
    timeline.add_argument("of", metavar="RUN", help="folder of a run, or the name of a run in runs/")
    timeline.add_argument("--update", type=int, metavar="N", help="the update that made version N (default: the last)")
    timeline.add_argument("--all", action="store_true", help="also the means over all updates")
    timeline.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write a trace, compressed if the name ends in .gz; with --update only of this update",
    )
    timeline.add_argument("--json", action="store_true", help="print JSON instead of text")
    timeline.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.monitor.status.report import find_run, read_config
    from megatron_webrl.monitor.timeline import page
    from megatron_webrl.monitor.timeline.explanation import UpdateExplainer, summarise
    from megatron_webrl.monitor.timeline.processes import read_timeline
    from megatron_webrl.monitor.timeline.trace import write_trace
    from megatron_webrl.track.summary import read_updates
    from megatron_webrl.track.timeline import PROFILES

    folder = find_run(options.of)
    config, updates = read_config(folder), read_updates(folder)
    trainer = UpdateExplainer(read_timeline(folder, role="trainer-0"), config)
    version = trainer.versions[-1] if options.update is None else options.update
    everything = options.all or (options.output is not None and options.update is None)
    processes = read_timeline(folder, window=None if everything else trainer.window(version))
    explainer = UpdateExplainer(processes, config, updates)
    update = explainer.explain(version)
    run = summarise([explainer.explain(each) for each in explainer.versions]) if options.all else None
    events = 0
    if options.output is not None:
        try:
            window = None if options.update is None else explainer.window(version)
            events = write_trace(options.output, processes, window, folder / PROFILES)
        except OSError as error:
            raise ConfigError(f"--output={options.output}: {error.strerror or error}") from None
    if options.json:
        content = {"update": update.to_json(), "all": None if run is None else asdict(run)}
        content["clock_errors"] = {f"{each.role}, pid {each.pid}": each.clock_error for each in processes}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(page.render_update(update))
    if run is not None:
        console.print()
        console.print(page.render_run(run))
    if line := page.clock_line(processes):
        console.print(line)
    if options.output is not None:
        console.print(f"{options.output}: {events} events; open it in https://ui.perfetto.dev", soft_wrap=True)
    return 0
