"""The command line of `webrl monitor`."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.tls import add_tls_options, tls_files

if TYPE_CHECKING:
    from megatron_webrl.control.http.http_service import Listener
    from megatron_webrl.monitor.run_set import RunSet

REFRESH_SECONDS = 2.0
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
    monitor.add_argument(
        "--address-file",
        type=Path,
        metavar="FILE",
        help="write the address to FILE; print no token",
    )
    add_tls_options(monitor)
    monitor.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_process
    from megatron_webrl.control.http.tokens import read_token
    from megatron_webrl.monitor.status.report import find_run

    folders = [find_run(each) for each in options.of]
    given = read_token("viewer", TOKEN_VARIABLE, "--token-file", options.token_file, "")
    token = secrets.token_urlsafe(24) if given is None else given.value
    tls = tls_files(options)
    try:
        from megatron_webrl.monitor.run_set import RunSet
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
        try:
            while not ended.is_set():
                await asyncio.sleep(REFRESH_SECONDS)
                await asyncio.to_thread(runs.refresh)
        finally:
            runs.close()
    return 1  # the HTTP server ended by itself
