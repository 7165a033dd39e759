"""`webrl browsers`: a node of a browser farm, and the router in front of many."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_browsers(commands: Any) -> None:
    """Add the command with its parts to `webrl`."""
    browsers = commands.add_parser("browsers", help="serve browser sessions over HTTP, on one machine or many")
    parts = browsers.add_subparsers(required=True, metavar="PART")
    serve = parts.add_parser(
        "serve",
        help="one node: the browsers of this machine",
        description="Serve browser sessions over HTTP until SIGTERM or Ctrl-C. All environments of all task sources "
        "can be opened, and any page of the web with browser.open_web=true. The address shows a page for people.",
        epilog="example: webrl browsers serve --sessions 16 browser.marks=true tasks.latency.median_seconds=0.3",
    )
    serve.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG key=value",
        help="a configuration file and settings that replace its own, both optional; of the sections browser, tasks "
        "(step limits, latency) and of rollout.operation_timeout_seconds are used",
    )
    _add_address(serve, 8700)
    serve.add_argument(
        "--sessions", type=int, default=8, metavar="N", help="sessions that are leased at a time (default: 8)"
    )
    serve.add_argument("--router", metavar="URL", help="a router to announce this node to")
    serve.add_argument("--address", metavar="URL", help="where clients reach this node (default: http://HOST:PORT)")
    for option, default, text in (
        ("--lease-seconds", 60.0, "lifetime of a lease that asks for none"),
        ("--max-lease-seconds", 3600.0, "longest lifetime that may be asked for"),
    ):
        serve.add_argument(option, type=float, default=default, metavar="S", help=f"{text} (default: {default:g})")
    serve.set_defaults(run=_serve)

    route = parts.add_parser(
        "route",
        help="the front of many nodes",
        description="Place leases on nodes, which announce themselves with `webrl browsers serve --router`, and send "
        "clients straight to them. Nothing is lost when it is restarted. The address shows a page for people.",
    )
    _add_address(route, 8701)
    route.set_defaults(run=_route)


def _add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1); elsewhere than there needs a token"
    )
    parser.add_argument("--port", type=int, default=port, help=f"0 for any free one (default: {port})")
    parser.add_argument("--address-file", type=Path, metavar="FILE", help="where to write {url, pid} once it answers")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token (default: WEBRL_BROWSERS_TOKEN)"
    )
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started it ends")


def _serve(options: argparse.Namespace) -> int:
    from megatron_webrl.farm.http_service import ListenAddress
    from megatron_webrl.farm.server.server_main import BrowserServerOptions, run_server

    settings = list(options.settings)
    config = settings.pop(0) if settings and "=" not in settings[0] else None
    return run_server(
        BrowserServerOptions(
            config=config,
            overrides=tuple(settings),
            address=ListenAddress(options.host, options.port, options.address, options.address_file),
            token_file=options.token_file,
            sessions=options.sessions,
            router=options.router,
            lease_seconds=options.lease_seconds,
            max_lease_seconds=options.max_lease_seconds,
            die_with_parent=options.die_with_parent,
        )
    )


def _route(options: argparse.Namespace) -> int:
    from megatron_webrl.farm.http_service import ListenAddress
    from megatron_webrl.farm.router.router_main import RouterOptions, run_router

    address = ListenAddress(options.host, options.port, address_file=options.address_file)
    return run_router(RouterOptions(address, options.token_file, options.die_with_parent))
