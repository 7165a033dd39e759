"""A worker's browsers: sessions of a browser farm, or of local browser servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.browser.server.local_servers import local_servers
from megatron_webrl.browser.server.protocol import SessionSpec
from megatron_webrl.config.schema import Config


@asynccontextmanager
async def open_browsers(config: Config, sessions: int, name: str) -> AsyncIterator[BrowserClient]:
    """Browsers for `sessions` concurrent episodes; `name` identifies the worker to a farm, and in log file names.

    Raises ProcessError (a local server), BrowserError (farm unreachable), ConfigError (farm with other settings).
    """
    rollout = config.rollout
    if config.browser.farm:
        async with BrowserClient(
            config.browser.farm,
            step_seconds=rollout.operation_timeout_seconds,
            wait_seconds=rollout.episode_timeout_seconds,
            spec=SessionSpec.from_config(config.browser),
            owner=f"{config.run.name}/{name}",
        ) as browsers:
            await browsers.wait_until_ready(config.run.startup_timeout_seconds)
            yield browsers
        return
    async with (
        local_servers(config, sessions, config.run_folder / "logs", f"{name}-browsers") as servers,
        BrowserClient(
            servers.poll_addresses,
            servers.token,
            step_seconds=rollout.operation_timeout_seconds,
            wait_seconds=rollout.episode_timeout_seconds,
        ) as browsers,
    ):
        yield browsers
