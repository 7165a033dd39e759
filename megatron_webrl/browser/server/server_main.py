"""Process of a browser server."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server.api import CLIENT, server_app
from megatron_webrl.browser.server.browser_server import DEFAULT_LEASE_SECONDS, MAX_LEASE_SECONDS, BrowserServer
from megatron_webrl.browser.server.protocol import TOKEN_VARIABLE
from megatron_webrl.browser.server.session_limits import check_session_limits
from megatron_webrl.browser.server.task_catalog import TaskCatalog
from megatron_webrl.config.browser import check_browser_user
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server, run_process
from megatron_webrl.control.http.tokens import Token, read_token, reason_for_token

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BrowserServerOptions:
    """Options of `webrl browsers serve`."""

    config: str | None
    overrides: tuple[str, ...]
    address: ListenAddress
    sessions: int
    die_with_parent: bool
    token_file: Path | None = None  # None: the environment has the token
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    max_lease_seconds: float = MAX_LEASE_SECONDS


def run_server(options: BrowserServerOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError."""
    if options.sessions < 1:
        raise ConfigError(f"--sessions={options.sessions} must be at least 1")
    if not 0 < options.lease_seconds <= options.max_lease_seconds:
        raise ConfigError(
            f"--lease-seconds={options.lease_seconds:g} must be greater than 0 and at most "
            f"--max-lease-seconds={options.max_lease_seconds:g}"
        )
    needed = reason_for_token(options.address.host)
    token = read_token(CLIENT, TOKEN_VARIABLE, "--token-file", options.token_file, needed)
    config = parse_config(options.config, list(options.overrides))
    check_sections(config)
    check_browser_user(config.browser)
    check_session_limits(options.sessions, options.address.limits.max_connections)
    listener = Listener(options.address)
    return run_process("browser-server", _run(options, config, token, listener), options.die_with_parent)


async def _run(options: BrowserServerOptions, config: Config, token: Token | None, listener: Listener) -> int:
    catalog, timeout = TaskCatalog.from_config(config), config.rollout.operation_timeout_seconds
    try:
        async with (
            BrowserPool(config.browser, catalog.sites, options.sessions, timeout) as pool,
            BrowserServer(
                config, catalog, pool, options.sessions, listener.url, options.lease_seconds, options.max_lease_seconds
            ) as server,
            run_http_server(server_app(server, token), listener) as ended,
        ):
            await ended.wait()
    except BrowserError as error:
        log.error("%s", error)
        return 1
    finally:
        catalog.close()
    return 1  # the HTTP server ended by itself
