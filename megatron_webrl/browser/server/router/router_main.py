"""Process of a router."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.browser.server.access import TokenFiles, Tokens, read_tokens
from megatron_webrl.browser.server.router.router import Router
from megatron_webrl.browser.server.router.router_api import router_app
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server, run_process


@dataclass(frozen=True)
class RouterOptions:
    """Options of `webrl browsers route`."""

    address: ListenAddress
    token_files: TokenFiles
    die_with_parent: bool


def run_router(options: RouterOptions) -> int:
    """Route until SIGTERM or SIGINT; returns the exit code. Raises ConfigError."""
    tokens = read_tokens(options.address.host, options.token_files, with_router=True)
    return run_process("browser-router", _run(Listener(options.address), tokens), options.die_with_parent)


async def _run(listener: Listener, tokens: Tokens) -> int:
    async with Router(tokens.client) as router, run_http_server(router_app(router, tokens.all()), listener) as ended:
        await ended.wait()
    return 1  # the HTTP server ended by itself
