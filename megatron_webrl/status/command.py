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

    from megatron_webrl.status.control_probe import ControlProbe
    from megatron_webrl.status.report import RunReport

WIDTH = 140  # of a page that goes to no terminal


def add_status(commands: Any) -> None:
    """Add the command to the parser's."""
    status = commands.add_parser(
        "status",
        help="what a run is at: its job, each process, how fast it goes, what went wrong",
        description="Say what a run is at while its job runs, after it has ended, and after it was killed, from any "
        "machine that sees its folder. Asks the job's control plane where it can be reached, and disturbs nothing. "
        "Ends with 0 if the run is running or has ended well, 1 if it failed or nothing is heard of it, 2 if there is "
        "no such run. docs/status.md",
        epilog="example: webrl status quickstart --watch 5",
    )
    status.add_argument("of", metavar="RUN", help="folder of a run, or its name in runs/")
    status.add_argument(
        "--watch", type=float, metavar="SECONDS", help="show it anew every so often, until the job has ended; or Ctrl-C"
    )
    kind = status.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print everything as JSON; with --watch a line each time")
    kind.add_argument(
        "--events", action="store_true", help="list what happened to the processes, in all jobs of the run"
    )
    status.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.status.control_probe import ControlProbe
    from megatron_webrl.status.report import build_report, find_run

    if options.watch is not None and options.watch <= 0:
        raise ConfigError(f"--watch={options.watch:g} must be greater than 0, in seconds")
    folder = find_run(options.of)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    with ControlProbe() as observer:
        if options.watch is not None:
            return _watch(folder, observer, options, console)
        report = build_report(folder, observer)
    if options.json:
        _print_json(report, indent=1)
    else:
        console.print(_picture(report, options))
    return _code(report)


def _watch(folder: Path, observer: ControlProbe, options: argparse.Namespace, console: Console) -> int:
    """Show reports until the job has ended or somebody presses Ctrl-C; the code is that of the last one."""
    from rich.live import Live

    from megatron_webrl.status.report import build_report

    screen = console.is_terminal and not options.json
    code = 0
    try:
        with Live(console=console, auto_refresh=False, screen=screen) if screen else nullcontext() as live:
            while True:
                report = build_report(folder, observer)
                code = _code(report)
                if options.json:
                    _print_json(report, indent=None)
                elif live is not None:
                    live.update(_picture(report, options), refresh=True)
                else:
                    console.print(_picture(report, options))
                if report.ended_at is not None:
                    break
                time.sleep(options.watch)
    except KeyboardInterrupt:
        pass
    if screen:
        console.print(_picture(report, options))  # what was last seen stays
    return code


def _picture(report: RunReport, options: argparse.Namespace) -> RenderableType:
    from megatron_webrl.status.page import events_table, render_report

    return events_table(report.events) if options.events else render_report(report)


def _print_json(report: RunReport, indent: int | None) -> None:
    sys.stdout.write(json.dumps(report.to_json(), indent=indent) + "\n")
    sys.stdout.flush()


def _code(report: RunReport) -> int:
    return 0 if report.healthy else 1
