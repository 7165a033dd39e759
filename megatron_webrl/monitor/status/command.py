"""The command line of `webrl status`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.setting import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from megatron_webrl.monitor.status.report import RunReport

WIDTH = 140  # of output that does not go to a terminal


def add_status(commands: Any) -> None:
    """Add `webrl status` to the parser."""
    status = commands.add_parser(
        "status",
        help="state of a run: job, processes, speed, failures",
        description="Show the state of a run while its job runs, after it has ended, and after it was killed, from any "
        "machine that sees its folder. Queries the job's control service if it can be reached; read-only. "
        "Exit code 0: the run is running or has ended cleanly; 1: it failed or does not respond; 2: there is no such "
        "run. docs/status.md",
        epilog="example: webrl status quickstart --watch 5",
    )
    status.add_argument("of", metavar="RUN", help="folder of a run, or the name of a run in runs/")
    status.add_argument(
        "--watch", type=float, metavar="SECONDS", help="refresh every SECONDS until the job has ended, or Ctrl-C"
    )
    kind = status.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print JSON; with --watch one line per refresh")
    kind.add_argument("--events", action="store_true", help="list the events of the processes, in all jobs of the run")
    status.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.monitor.status.report import build_report, find_run

    if options.watch is not None and options.watch <= 0:
        raise ConfigError(f"--watch={options.watch:g} must be greater than 0, in seconds")
    folder = find_run(options.of)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if options.watch is not None:
        return _watch(folder, options, console)
    report = build_report(folder)
    if options.json:
        _print_json(report, indent=1)
    else:
        console.print(_render(report, options))
    return _exit_code(report)


def _watch(folder: Path, options: argparse.Namespace, console: Console) -> int:
    """Show reports until the job has ended or Ctrl-C; returns the exit code of the last report."""
    from rich.live import Live

    from megatron_webrl.monitor.status.report import build_report

    screen = console.is_terminal and not options.json
    code = 0
    try:
        with Live(console=console, auto_refresh=False, screen=screen) if screen else nullcontext() as live:
            while True:
                report = build_report(folder)
                code = _exit_code(report)
                if options.json:
                    _print_json(report, indent=None)
                elif live is not None:
                    live.update(_render(report, options), refresh=True)
                else:
                    console.print(_render(report, options))
                if report.ended_at is not None:
                    break
                time.sleep(options.watch)
    except KeyboardInterrupt:
        pass
    if screen:
        console.print(_render(report, options))  # outlasts the live screen
    return code


def _render(report: RunReport, options: argparse.Namespace) -> RenderableType:
    from megatron_webrl.monitor.status.page import events_table, render_report

    return events_table(report.events) if options.events else render_report(report)


def _print_json(report: RunReport, indent: int | None) -> None:
    sys.stdout.write(json.dumps(report.to_json(), indent=indent) + "\n")
    sys.stdout.flush()


def _exit_code(report: RunReport) -> int:
    return 0 if report.healthy else 1
