"""The command lines of `webrl monitor`, `webrl status` and `webrl timeline`."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.access import add_tls_options, server_context

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_webrl.control.http.http_service import Listener
    from megatron_webrl.monitor.app import RunSet

REFRESH_SECONDS = 2.0
WIDTH = 120  # of output that does not go to a terminal
TOKEN_VARIABLE = "WEBRL_MONITOR_TOKEN"


def add_monitor(commands: Any) -> None:
    """Add `webrl monitor` to the parser."""
    monitor = commands.add_parser(
        "monitor",
        help="look at runs in a browser: learning, episodes, what the model saw; compare runs",
        description="Serve the web pages of runs, running or ended, until Ctrl-C: how each learns, every stored "
        "episode with screenshots, prompts, tokens and verdict; several runs in one chart, with the settings in which "
        "they differ. Prints the address, which holds a token. Read-only. docs/monitor.md",
        epilog="example: webrl monitor quickstart half-rate",
    )
    monitor.add_argument("of", metavar="RUN", nargs="+", help="folder of a run, or the name of a run in runs/")
    monitor.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    monitor.add_argument("--port", type=int, default=8600, help="port to listen on, 0: any free one (default: 8600)")
    monitor.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"file with the token (default: {TOKEN_VARIABLE}, else random)"
    )
    monitor.add_argument("--address-file", type=Path, metavar="FILE", help="write the address to FILE; print no token")
    add_tls_options(monitor)
    monitor.set_defaults(run=_serve_pages)


def add_status(commands: Any) -> None:
    """Add `webrl status` to the parser."""
    status = commands.add_parser(
        "status",
        help="state of a run: job, processes, speed, failures",
        description="Print the state of a run while its job runs, after it has ended, and after it was killed, from "
        "any machine that sees its folder, as the page Run shows it. Queries the job's control service if it can be "
        "reached; read-only. Exit code 0: the run is running or has ended cleanly; 1: it failed or does not respond; "
        "2: there is no such run. docs/monitor.md",
        epilog="example: webrl status quickstart",
    )
    status.add_argument("of", metavar="RUN", help="folder of a run, or the name of a run in runs/")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_print_status)


def _print_status(options: argparse.Namespace) -> int:
    from megatron_webrl.monitor.status import find_run, read_status, render_status

    status = read_status(find_run(options.of))
    if options.json:
        sys.stdout.write(json.dumps(asdict(status), indent=1) + "\n")
    else:
        _console().print(render_status(status))
    return 0 if status.healthy else 1


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def add_timeline(commands: Any) -> None:
    """Add `webrl timeline` to the parser."""
    timeline = commands.add_parser(
        "timeline",
        help="what bounded an update, and a trace of all processes",
        description="Print what bounded an update of a run with tracking.timeline, in seconds and shares; write a "
        "trace for ui.perfetto.dev or chrome://tracing. Read-only. docs/monitor.md",
        epilog="example: webrl timeline quickstart --update 12 --output update-12.json.gz",
    )
    timeline.add_argument("of", metavar="RUN", help="folder of a run, or the name of a run in runs/")
    timeline.add_argument("--update", type=int, metavar="N", help="the update that made version N (default: the last)")
    timeline.add_argument(
        "--output", type=Path, metavar="FILE",
        help="write a trace, compressed if the name ends in .gz; with --update only of this update",
    )  # fmt: skip
    timeline.add_argument("--json", action="store_true", help="print JSON")
    timeline.set_defaults(run=_print_timeline)


def _print_timeline(options: argparse.Namespace) -> int:
    from megatron_webrl.monitor.status import find_run
    from megatron_webrl.monitor.timeline import bound_table, read_timeline, read_update
    from megatron_webrl.monitor.trace import write_trace

    folder = find_run(options.of)
    bound, window, processes = read_update(folder, options.update)
    if options.json:
        sys.stdout.write(json.dumps(bound.to_json(), indent=1) + "\n")
    else:
        _console().print(bound_table(bound))
    if options.output is not None:
        if options.update is None:
            processes = read_timeline(folder)
        try:
            events = write_trace(options.output, processes, None if options.update is None else window)
        except OSError as error:
            raise ConfigError(f"--output={options.output}: {error.strerror or error}") from None
        sys.stderr.write(f"{options.output}: {events} events; open it in https://ui.perfetto.dev\n")
    return 0


def _serve_pages(options: argparse.Namespace) -> int:
    from megatron_webrl.control.http.access import read_token
    from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_process
    from megatron_webrl.monitor.status import find_run

    folders = [find_run(each) for each in options.of]
    given = read_token(TOKEN_VARIABLE, "--token-file", options.token_file, "")
    token = secrets.token_urlsafe(24) if given is None else given.value
    tls = server_context(options.tls_certificate, options.tls_key)
    try:
        from megatron_webrl.monitor.app import RunSet
    except ModuleNotFoundError as error:
        raise ConfigError(f"webrl monitor needs {error.name}: pip install 'megatron_webrl[monitor]'") from None
    runs = RunSet(folders)
    listener = Listener(ListenAddress(options.host, options.port, address_file=options.address_file, tls=tls))
    query = "" if options.address_file else f"/?token={token}"
    return run_process("monitor", _serve(runs, listener, token, query), die_with_parent=False)


async def _serve(runs: RunSet, listener: Listener, token: str, query: str) -> int:
    """Serve until cancelled. `query`: of the address that is printed."""
    from megatron_webrl.control.http.http_service import run_http_server
    from megatron_webrl.monitor.access import MonitorAccess

    await asyncio.to_thread(runs.refresh)
    app = MonitorAccess(runs.app(), token, f"webrl-{listener.socket.getsockname()[1]}")
    async with run_http_server(app, listener) as ended:
        for pages in runs.pages.values():
            sys.stdout.write(f"{pages.folder}: {len(pages.index)} episodes\n")
        place = "#/compare" if len(runs.pages) > 1 else ""
        sys.stdout.write(f"open {listener.url}{query}{place}\n")
        sys.stdout.flush()
        while not ended.is_set():
            await asyncio.sleep(REFRESH_SECONDS)
            await asyncio.to_thread(runs.refresh)
    return 1  # the HTTP server ended by itself
