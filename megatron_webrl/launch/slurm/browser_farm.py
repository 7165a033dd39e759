"""`webrl node browsers`: the browser server of a node, where browsers have nodes of their own. docs/farm.md"""

from __future__ import annotations

import math
import socket
from urllib.parse import urlsplit

from megatron_webrl.browser.server.access import TokenFiles
from megatron_webrl.browser.server.server_main import BrowserServerOptions, run_server
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.http_service import ListenAddress
from megatron_webrl.util.network import own_address


def serve_browsers(path: str, overrides: list[str], router: str, port: int, nodes: int) -> int:
    """Serve until SIGTERM; returns the exit code. Tokens come from the environment. Raises ConfigError."""
    return run_server(
        BrowserServerOptions(
            config=path,
            overrides=tuple(overrides),
            address=ListenAddress(local_address_towards(router), port),
            token_files=TokenFiles(),
            sessions=sessions_per_server(parse_config(path, overrides), nodes),
            router=router,
            lease_seconds=60.0,
            max_lease_seconds=3600.0,
            die_with_parent=True,
        )
    )


def sessions_per_server(config: Config, nodes: int) -> int:
    """Sessions per browser server if `nodes` of them serve all episodes that the workers run at a time."""
    return math.ceil(config.sessions_per_worker * config.rollout.engines / nodes)


def local_address_towards(url: str) -> str:
    """The address of this machine on the way to a URL. Raises ConfigError for a URL without a host that is known."""
    parts = urlsplit(url)
    try:
        return own_address(parts.hostname or "", parts.port or 80, socket.AF_INET)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--router={url}: {error}; give an address such as http://node7:8700") from error
