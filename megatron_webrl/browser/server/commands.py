"""`webrl browsers`: browser server and router of a browser farm."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.control.http.tls import add_tls_options, tls_files

if TYPE_CHECKING:
    from megatron_webrl.control.http.http_service import ListenAddress


def add_browsers(commands: Any) -> None:
    """Add the command and its subcommands to `webrl`."""
    browsers = commands.add_parser("browsers", help="serve browser sessions over HTTP, on one machine or many")
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
        "settings",
        nargs="*",
        metavar="CONFIG key=value",
        help="optional configuration file and settings that override it; used are browser, the step limits, latency "
        "and offline_websites of tasks, and rollout.operation_timeout_seconds",
    )
    _add_address(serve, 8700)
    serve.add_argument("--sessions", type=int, default=8, metavar="N", help="maximum number of leases (default: 8)")
    serve.add_argument("--router", metavar="URL", help="router to register with")
    serve.add_argument("--address", metavar="URL", help="URL for clients (default: http://HOST:PORT)")
    for option, default, text in (
        ("--lease-seconds", 60.0, "default lifetime of a lease"),
        ("--max-lease-seconds", 3600.0, "maximum lifetime of a lease"),
    ):
        serve.add_argument(option, type=float, default=default, metavar="S", help=f"{text} (default: {default:g})")
    serve.set_defaults(run=_serve)
    route = subcommands.add_parser(
        "route",
        help="router: places leases on many browser servers",
        description="Place leases on the browser servers that register with `webrl browsers serve --router`, and "
        "redirect clients to them. A restart loses nothing. The address shows a status page.",
    )
    _add_address(route, 8701)
    route.set_defaults(run=_route)


def _add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1); any other than loopback needs a token",
    )
    parser.add_argument("--port", type=int, default=port, help=f"port to listen on, 0: any free one (default: {port})")
    parser.add_argument(
        "--address-file", type=Path, metavar="FILE", help="file that receives {url, pid} once the server is ready"
    )
    for option, variable, text in (
        ("--token-file", "WEBRL_BROWSERS_TOKEN", "the clients' token"),
        ("--server-token-file", "WEBRL_BROWSERS_SERVER_TOKEN", "the token with which servers register with a router"),
    ):
        parser.add_argument(option, type=Path, metavar="FILE", help=f"file with {text} (default: {variable})")
    add_tls_options(parser)
    parser.add_argument(
        "--max-connections", type=int, default=8192, metavar="N", help="open connections in all (default: 8192)"
    )
    parser.add_argument(
        "--max-connections-per-address", type=int, default=2048, metavar="N",
        help="open connections of one client address (default: 2048)",
    )  # fmt: skip
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")


def _serve(options: argparse.Namespace) -> int:
    from megatron_webrl.browser.server.access import TokenFiles
    from megatron_webrl.browser.server.server_main import BrowserServerOptions, run_server

    settings = list(options.settings)
    config = settings.pop(0) if settings and "=" not in settings[0] else None
    return run_server(
        BrowserServerOptions(
            config=config,
            overrides=tuple(settings),
            address=_listen_address(options, options.address),
            token_files=TokenFiles(options.token_file, options.server_token_file),
            sessions=options.sessions,
            router=options.router,
            lease_seconds=options.lease_seconds,
            max_lease_seconds=options.max_lease_seconds,
            die_with_parent=options.die_with_parent,
        )
    )


def _route(options: argparse.Namespace) -> int:
    from megatron_webrl.browser.server.access import TokenFiles
    from megatron_webrl.browser.server.router.router_main import RouterOptions, run_router

    return run_router(
        RouterOptions(
            _listen_address(options, None),
            TokenFiles(options.token_file, options.server_token_file),
            options.die_with_parent,
        )
    )


def _listen_address(options: argparse.Namespace, public_url: str | None) -> ListenAddress:
    from megatron_webrl.control.http.connections import ConnectionLimits
    from megatron_webrl.control.http.http_service import ListenAddress

    tls = tls_files(options)
    limits = ConnectionLimits(options.max_connections, options.max_connections_per_address)
    return ListenAddress(options.host, options.port, public_url, options.address_file, limits, tls)
