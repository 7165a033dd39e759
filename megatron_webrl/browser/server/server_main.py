"""Process of a browser server."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server.access import TokenFiles, Tokens, read_tokens
from megatron_webrl.browser.server.browser_server import BrowserServer
from megatron_webrl.browser.server.registration import register_with_router
from megatron_webrl.browser.server.request_validation import TaskCatalog
from megatron_webrl.browser.server.server_api import server_app
from megatron_webrl.browser.server.session_limits import check_session_limits
from megatron_webrl.config.browser import check_browser_user
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server, run_process

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BrowserServerOptions:
    """Options of `webrl browsers serve`."""

    config: str | None
    overrides: tuple[str, ...]
    address: ListenAddress
    token_files: TokenFiles
    sessions: int
    router: str | None
    lease_seconds: float
    max_lease_seconds: float
    die_with_parent: bool


def run_server(options: BrowserServerOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError."""
    _check(options)
    tokens = read_tokens(options.address.host, options.token_files, with_router=options.router is not None)
    config = parse_config(options.config, list(options.overrides))
    check_sections(config)
    check_browser_user(config.browser)
    check_session_limits(options.sessions, options.address.limits.max_connections)
    listener = Listener(options.address)
    return run_process("browser-server", _run(options, config, tokens, listener), options.die_with_parent)


async def _run(options: BrowserServerOptions, config: Config, tokens: Tokens, listener: Listener) -> int:
    catalog, timeout = TaskCatalog.from_config(config), config.rollout.operation_timeout_seconds
    try:
        async with (
            BrowserPool(config.browser, catalog.sites, options.sessions, timeout) as pool,
            BrowserServer(
                config, catalog, pool, options.sessions, listener.url, options.lease_seconds, options.max_lease_seconds
            ) as server,
            run_http_server(server_app(server, [tokens.client] if tokens.client else []), listener) as ended,
            register_with_router(server, options.router, tokens.server),
        ):
            await ended.wait()
    except BrowserError as error:
        log.error("%s", error)
        return 1
    finally:
        catalog.close()
    return 1  # the HTTP server ended by itself


def _check(options: BrowserServerOptions) -> None:
    for option, url in (("--router", options.router), ("--address", options.address.public_url)):
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"{option}={url} is not an address such as http://node7:8700")
    if options.sessions < 1:
        raise ConfigError(f"--sessions={options.sessions} must be at least 1")
    if not 0 < options.lease_seconds <= options.max_lease_seconds:
        raise ConfigError(
            f"--lease-seconds={options.lease_seconds:g} must be greater than 0 and at most "
            f"--max-lease-seconds={options.max_lease_seconds:g}"
        )
