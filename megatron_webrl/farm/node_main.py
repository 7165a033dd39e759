"""A node as a process, from nothing to its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.fleet import Fleet
from megatron_webrl.config import Config, ConfigError, read
from megatron_webrl.config_checks import check_farm
from megatron_webrl.farm.announcing import announcing
from megatron_webrl.farm.guard import read_token
from megatron_webrl.farm.node import Node
from megatron_webrl.farm.node_api import node_app
from megatron_webrl.farm.opening import Catalogue
from megatron_webrl.farm.serve import Address, Listener, run_process, serving

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeOptions:
    """The command line of a node."""

    config: str | None
    overrides: tuple[str, ...]
    address: Address
    token_file: Path | None
    sessions: int
    router: str | None
    lease_seconds: float
    max_lease_seconds: float
    die_with_parent: bool


def run(options: NodeOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError."""
    token = read_token(options.address.host, options.token_file)
    config = read(options.config, list(options.overrides))
    check_farm(config)
    _check(options)
    listener = Listener(options.address)
    return run_process("node", _run(options, config, token, listener), options.die_with_parent)


async def _run(options: NodeOptions, config: Config, token: str | None, listener: Listener) -> int:
    catalogue = Catalogue.of(config)
    try:
        async with (
            Fleet(config.browser, catalogue.sites, options.sessions, config.rollout.step_seconds) as fleet,
            Node(
                config, catalogue, fleet, options.sessions, listener.url, options.lease_seconds,
                options.max_lease_seconds,
            ) as node,
            serving(node_app(node, token), listener) as ended,
            announcing(node, options.router, token),
        ):  # fmt: skip
            await ended.wait()
    except BrowserError as error:
        log.error("%s", error)
        return 1
    finally:
        catalogue.close()
    return 1  # nobody asked for the end


def _check(options: NodeOptions) -> None:
    for option, url in (("--router", options.router), ("--address", options.address.url)):
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"{option}={url} is not an address such as http://node7:8700")
    if options.sessions < 1:
        raise ConfigError(f"--sessions={options.sessions} must be at least 1")
    if not 0 < options.lease_seconds <= options.max_lease_seconds:
        raise ConfigError(
            f"--lease-seconds={options.lease_seconds:g} must be greater than 0 and at most "
            f"--max-lease-seconds={options.max_lease_seconds:g}"
        )
