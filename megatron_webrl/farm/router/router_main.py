"""Process of a router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.farm.access import read_client_token
from megatron_webrl.farm.router.router import Router
from megatron_webrl.farm.router.router_api import router_app
from megatron_webrl.service.http_service import ListenAddress, Listener, run_http_server, run_process
from megatron_webrl.service.tokens import Token


@dataclass(frozen=True)
class RouterOptions:
    """Options of `webrl browsers route`."""

    address: ListenAddress
    token_file: Path | None
    die_with_parent: bool


def run_router(options: RouterOptions) -> int:
    """Route until SIGTERM or SIGINT; returns the exit code. Raises ConfigError."""
    token = read_client_token(options.address.host, options.token_file)
    return run_process("browser-router", _run(Listener(options.address), token), options.die_with_parent)


async def _run(listener: Listener, token: Token | None) -> int:
    value, tokens = (token.value, [token]) if token else (None, [])
    async with Router(value) as router, run_http_server(router_app(router, tokens), listener) as ended:
        await ended.wait()
    return 1  # the HTTP server ended by itself
