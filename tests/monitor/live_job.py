"""The rollouts of a job, without the job: a control service, workers with real tables, and unfinished episodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.track.live_rollouts import LiveRollout, RolloutTable, RunningEpisodes
from megatron_webrl.types import Trajectory
from tests.control.service_process import FREQUENT_HEARTBEATS, ServiceProcess, service_process

POLL_SECONDS = 0.05


@dataclass
class Worker:
    """A worker's table, which it reports and polls as the pool does."""

    control: ControlClient
    table: RolloutTable = field(default_factory=RolloutTable)

    def open(self, episode: Trajectory) -> LiveRollout:
        """A rollout whose episode so far is this one."""
        live = self.table.open("training", episode.ticket, episode.index, episode.group_size, episode.task)
        live.start_try()
        live.episode_so_far = lambda: replace(episode, outcome="", end_reason="", verdict=None)
        return live

    async def run(self, config: Config) -> None:
        episodes = RunningEpisodes(config, self.control, self.table)
        try:
            while True:
                episodes.poll()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await episodes.close()


@asynccontextmanager
async def live_job(config: Config, workers: Sequence[str] = ("rollout-0",)) -> AsyncIterator[list[Worker]]:
    """The workers of a job in the run's folder, until the end of the context."""
    with service_process(config.run_folder, 60.0, FREQUENT_HEARTBEATS) as service:
        made = [_connect(service, name) for name in workers]
        tasks = [asyncio.create_task(each.run(config)) for each in made]
        try:
            yield made
        finally:
            for each, task in zip(made, tasks, strict=True):
                each.control.close()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _connect(service: ServiceProcess, name: str) -> Worker:
    control = service.connect(name)
    control.start_heartbeat()
    return Worker(control)
