"""Episodes over two browser servers that record, then over two that replay."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from megatron_webrl.browser.egress.har import har_name
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.browser.server.local_servers import LocalServers, local_servers
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.agent import Agent, Episode
from megatron_webrl.rollout.toolset import format_tool_call
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.track.metrics import episode_metrics
from megatron_webrl.types import Action, Group, Trajectory
from tests.browser.server.servers import config_for
from tests.rollout.test_agent import SETTINGS, Answers, task

ELSEWHERE = format_tool_call(Action("navigate", url="http://miniwob.localhost/miniwob/never.html"))
EPISODES = 3


async def run(browsers: BrowserClient, processor: Processor, index: int, *responses: str, **changes: Any) -> Trajectory:
    live = LiveRollout(replace(task("enter-text"), **changes), index=index, group_size=EPISODES)
    return await Agent(browsers, processor).run(Answers(processor, list(responses)), Episode(SETTINGS, live))


async def metric_total(servers: LocalServers, name: str) -> float:
    """The sum of a metric over all servers."""
    total = 0.0
    async with aiohttp.ClientSession() as client:
        for url in servers.addresses():
            async with client.get(f"{url}/metrics") as answer:
                text = await answer.text()
            total += sum(float(value) for value in re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE))
    return total


async def test_servers_share_recordings_and_count_what_none_of_them_answers(tiny_model: Path, tmp_path: Path) -> None:
    processor, folder = Processor.load(tiny_model), str(tmp_path / "recordings")
    async with (
        local_servers(config_for(processes=2, record=folder), 4) as servers,
        BrowserClient(servers.poll_addresses, servers.token) as browsers,
    ):
        recorded = await asyncio.gather(*(run(browsers, processor, index) for index in range(EPISODES)))
    assert [each.page_reward for each in recorded] == [1.0] * EPISODES
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == [f"{har_name(recorded[0].task)}.{visit}.zip" for visit in range(EPISODES)]
    async with (
        local_servers(config_for(processes=2, replay=folder), 4) as servers,
        BrowserClient(servers.poll_addresses, servers.token) as browsers,
    ):
        replayed = await asyncio.gather(*(run(browsers, processor, index) for index in range(EPISODES)))
        strayed = await run(browsers, processor, 0, ELSEWHERE, max_steps=1)
        missing = await run(browsers, processor, 0, id="miniwob/enter-text/2")
        assert await metric_total(servers, 'webrl_browsers_requests_refused_total{reason="not_recorded"}') == 1
        assert await metric_total(servers, "webrl_browsers_requests_replayed_total") > 10
        assert await metric_total(servers, "webrl_browsers_connections_total") == 0
    for before, after in zip(recorded, replayed, strict=True):
        assert (before.images, before.page_reward) == (after.images, after.page_reward)
    assert (missing.outcome, missing.trainable) == ("not_recorded", False)
    assert [step.not_recorded_requests for step in strayed.steps] == [1]
    group = Group(0, tuple(replace(each, outcome="failure") for each in (*replayed, strayed)))
    assert episode_metrics([group])["not_recorded_requests_per_episode"] == pytest.approx(1 / (EPISODES + 1))
    assert np.mean([step.not_recorded_requests for each in replayed for step in each.steps]) == 0
