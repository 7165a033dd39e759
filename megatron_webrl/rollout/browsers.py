"""A worker's browsers: those of a farm, or of nodes of its own. Episodes see no difference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatron_webrl.config.schema import Config
from megatron_webrl.farm.client import BrowserClient
from megatron_webrl.farm.local_servers import local_servers
from megatron_webrl.farm.protocol import SessionSpec


@asynccontextmanager
async def open_browsers(config: Config, sessions: int, name: str) -> AsyncIterator[BrowserClient]:
    """Browsers for `sessions` episodes at a time; `name` is told to a farm, and names the logs of own nodes.

    Raises ProcessError if an own node does not start, BrowserError for a farm that is not there, ConfigError for one
    that does not fit the run.
    """
    rollout = config.rollout
    if config.browser.farm:
        async with BrowserClient(
            config.browser.farm, step_seconds=rollout.operation_timeout_seconds, wait_seconds=rollout.episode_timeout_seconds,
            spec=SessionSpec.from_config(config.browser), owner=f"{config.run.name}/{name}",
        ) as browsers:  # fmt: skip
            await browsers.wait_until_ready(config.run.startup_timeout_seconds)
            yield browsers
        return
    async with (
        local_servers(config, sessions, config.run_folder / "logs", f"{name}-browsers") as nodes,
        BrowserClient(
            nodes.poll_addresses,
            nodes.token,
            step_seconds=rollout.operation_timeout_seconds,
            wait_seconds=rollout.episode_timeout_seconds,
        ) as browsers,
    ):
        yield browsers
