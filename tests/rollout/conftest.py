"""Fixtures of the tests of rollout workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.browser.server.local_servers import LocalServers
from megatron_webrl.browser.server.protocol import TOKEN_VARIABLE
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.model.processor import Processor
from tests.browser.server.servers import config_for
from tests.waiting import until


@pytest.fixture(scope="session")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


@pytest.fixture(scope="package")
def browser_server() -> Iterator[LocalServers]:
    """One browser server for all workers, as in a cluster."""
    servers = LocalServers(config_for(), sessions=8)
    try:
        servers.start()
        until(servers.poll_addresses, "the browser server", 120)
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="module")
def shared_browsers(browser_server: LocalServers) -> BrowserConfig:
    """Settings of a worker that uses it. Its token is in the environment until the module ends."""
    os.environ[TOKEN_VARIABLE] = browser_server.token
    return config_for(servers=",".join(browser_server.addresses())).browser
