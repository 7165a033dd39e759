"""`webrl browsers`: the browser server of a machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_webrl.control.http.access import add_tls_options, server_context


def add_browsers(commands: Any) -> None:
    """Add the command and its subcommand to `webrl`."""
    browsers = commands.add_parser("browsers", help="serve browser sessions over HTTP")
    subcommands = browsers.add_subparsers(required=True, metavar="PART")
    serve = subcommands.add_parser(
        "serve",
        help="browser server: the browsers of this machine",
        description="Serve browser sessions over HTTP until SIGTERM or Ctrl-C: all environments of all task sources, "
        "with browser.open_web=true any web page, and with tasks.offline_websites=true offline websites. The address "
        "shows a status page.",
        epilog="example: webrl browsers serve --sessions 16 browser.marks=true tasks.latency.median_seconds=0.3",
    )
    serve.add_argument(
        "settings", nargs="*", metavar="CONFIG key=value",
        help="optional configuration file and settings that override it; used are browser, the step limits, latency "
        "and offline_websites of tasks, and rollout.operation_timeout_seconds",
    )  # fmt: skip
    for option, kind, default, metavar, text in (
        ("--host", str, "127.0.0.1", None, "address to listen on (default: 127.0.0.1); any other than loopback needs a "
         "token"),
        ("--port", int, 8700, None, "port to listen on, 0: any free one (default: 8700)"),
        ("--address-file", Path, None, "FILE", "file that receives {url, pid} once the server is ready"),
        ("--token-file", Path, None, "FILE", "file with the clients' token (default: WEBRL_BROWSERS_TOKEN)"),
        ("--sessions", int, 8, "N", "maximum number of leases (default: 8)"),
        ("--max-connections", int, 8192, "N", "open connections in all (default: 8192)"),
    ):  # fmt: skip
        serve.add_argument(option, type=kind, default=default, metavar=metavar, help=text)
    add_tls_options(serve)
    serve.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from megatron_webrl.browser.server.server_main import run_server
    from megatron_webrl.control.http.http_service import ConnectionLimits, ListenAddress

    settings = list(options.settings)
    config = settings.pop(0) if settings and "=" not in settings[0] else None
    limits = ConnectionLimits(options.max_connections)
    tls = server_context(options.tls_certificate, options.tls_key)
    address = ListenAddress(options.host, options.port, options.address_file, limits, tls)
    return run_server(config, settings, address, options.sessions, options.die_with_parent, options.token_file)
