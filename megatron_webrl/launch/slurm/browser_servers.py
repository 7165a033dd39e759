"""`webrl node browsers`: the browser server of a node, where browsers have nodes of their own."""

from __future__ import annotations

import math
import socket
from urllib.parse import urlsplit

from megatron_webrl.browser.server.browser_server import LeaseLimits
from megatron_webrl.browser.server.server_main import run_server
from megatron_webrl.config.browser import parse_server_addresses
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.http_service import ListenAddress


def serve_browsers(path: str, overrides: list[str], servers: str) -> int:
    """Serve at the one of the addresses `servers` that this machine has, until SIGTERM; returns the exit code. The
    token comes from the environment. Raises ConfigError.
    """
    addresses = parse_server_addresses(servers)
    config = parse_config(path, overrides)
    leases = LeaseLimits(sessions_per_server(config, len(addresses)))
    return run_server(path, overrides, own_listen_address(addresses), leases, die_with_parent=True)


def sessions_per_server(config: Config, servers: int) -> int:
    """Sessions per browser server if `servers` of them serve all episodes that the workers run at a time."""
    return math.ceil(config.sessions_per_worker * config.rollout.engines / servers)


def own_listen_address(addresses: tuple[str, ...]) -> ListenAddress:
    """The first of several addresses that is this machine's. Raises ConfigError if none is."""
    for address in addresses:
        parts = urlsplit(address)
        host = parts.hostname or ""
        try:
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError:
            continue  # another machine's
        return ListenAddress(host, parts.port or 80)
    raise ConfigError(
        f"--servers={','.join(addresses)} has no address of this machine; give one such as http://node7:8700"
    )
