"""A node's share of a job's browsers, where they are on nodes of their own: `webrl node browsers`. docs/farm.md"""

from __future__ import annotations

import math
import socket
from urllib.parse import urlsplit

from megatron_webrl.config import Config, ConfigError, read
from megatron_webrl.farm.node_main import NodeOptions, run
from megatron_webrl.farm.serve import Address


def serve(path: str, overrides: list[str], router: str, port: int, nodes: int) -> int:
    """Serve until SIGTERM; returns the exit code. The token comes from WEBRL_BROWSERS_TOKEN. Raises ConfigError."""
    return run(
        NodeOptions(
            config=path,
            overrides=tuple(overrides),
            address=Address(own_address(router), port),
            token_file=None,
            sessions=sessions(read(path, overrides), nodes),
            router=router,
            lease_seconds=60.0,
            max_lease_seconds=3600.0,
            die_with_parent=True,
        )
    )


def sessions(config: Config, nodes: int) -> int:
    """Sessions of each of so many nodes, for all episodes that the workers may run at a time."""
    rollout, evaluation = config.rollout, config.evaluation
    each = rollout.groups_in_flight * rollout.group_size + (evaluation.slots if evaluation.every else 0)
    return math.ceil(each * rollout.engines / nodes)


def own_address(url: str) -> str:
    """The address of this machine on the way to a URL. Raises ConfigError for a URL without a host that is known."""
    parts = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((parts.hostname or "", parts.port or 80))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"--router={url}: {error}; give an address such as http://node7:8700") from error
