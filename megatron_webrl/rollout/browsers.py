"""A worker's browsers: those of a farm, or of nodes of its own. Episodes see no difference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatron_webrl.config import Config
from megatron_webrl.farm.client import Browsers
from megatron_webrl.farm.local import own_nodes
from megatron_webrl.farm.wire import View


@asynccontextmanager
async def open_browsers(config: Config, sessions: int, name: str) -> AsyncIterator[Browsers]:
    """Browsers for `sessions` episodes at a time; `name` is told to a farm, and names the logs of own nodes.

    Raises ProcessError if an own node does not start, BrowserError for a farm that is not there, ConfigError for one
    that does not fit the run.
    """
    rollout = config.rollout
    if config.browser.farm:
        async with Browsers(
            config.browser.farm, step_seconds=rollout.step_seconds, wait_seconds=rollout.episode_seconds,
            view=View.of(config.browser), owner=f"{config.run.name}/{name}",
        ) as browsers:  # fmt: skip
            await browsers.check(config.run.start_seconds)
            yield browsers
        return
    async with (
        own_nodes(config, sessions, config.run_folder / "logs", f"{name}-browsers") as nodes,
        Browsers(
            nodes.tended, nodes.token, step_seconds=rollout.step_seconds, wait_seconds=rollout.episode_seconds
        ) as browsers,
    ):
        yield browsers
