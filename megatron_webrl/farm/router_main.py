"""A router as a process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.farm.guard import read_token
from megatron_webrl.farm.router import Router
from megatron_webrl.farm.router_api import router_app
from megatron_webrl.farm.serve import Address, Listener, run_process, serving


@dataclass(frozen=True)
class RouterOptions:
    """The command line of a router."""

    address: Address
    token_file: Path | None
    die_with_parent: bool


def run(options: RouterOptions) -> int:
    """Route until SIGTERM or SIGINT; returns the exit code. Raises ConfigError."""
    token = read_token(options.address.host, options.token_file)
    return run_process("router", _run(Listener(options.address), token), options.die_with_parent)


async def _run(listener: Listener, token: str | None) -> int:
    async with Router(token) as router, serving(router_app(router, token), listener) as ended:
        await ended.wait()
    return 1  # nobody asked for the end
