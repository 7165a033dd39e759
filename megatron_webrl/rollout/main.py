"""Run one rollout worker: demonstrations, engine, browsers, then the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import TypeVar

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.judge.budget import JobUsageMeter
from megatron_webrl.ring.ring import NodeRing, Ring
from megatron_webrl.rollout.demonstrations import write_demonstrations
from megatron_webrl.rollout.engine.followers import EngineFollowers
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.evaluator import run_evaluation_worker
from megatron_webrl.rollout.pool import RolloutPool
from megatron_webrl.rollout.ring_output import open_node_ring
from megatron_webrl.track.episodes import EpisodeStore
from megatron_webrl.track.timeline import Timeline, open_timeline

log = logging.getLogger(__name__)
T = TypeVar("T")

JOB_END_POLL_SECONDS = 1.0  # while the engine starts and demonstrations are recorded


def run(
    config: Config, control: ControlClient, worker: int, node_ring: NodeRing, nodes: Sequence[int] = (0,),
    weights_only: bool = False,
) -> None:  # fmt: skip
    """Run one worker until the job ends. Raises JobEnded if it ends before the pool has started.

    `nodes`: the engine's, the worker's first. There is neither a ring nor training with `weights_only`, for a check of
    the weight transfer, nor with evaluation.only.
    """
    control.start_heartbeat()
    this = _Worker(config, control, worker, control.register_instance(), nodes)
    log.info("instance %d of this worker", this.number)
    try:
        if weights_only:
            asyncio.run(this.serve_weight_check())
        elif config.evaluation.only:
            asyncio.run(this.evaluate())
        else:
            with (
                open_timeline(config, control.role, nodes[0]) as timeline,
                open_node_ring(config, control, node_ring, first_instance=this.number == 1) as ring,
            ):
                asyncio.run(this.train(ring, timeline))
    finally:
        control.close()


@dataclass(frozen=True)
class _Worker:
    """One instance of a worker. Its methods raise JobEnded or JobFailed."""

    config: Config
    control: ControlClient
    index: int
    number: int  # of the instance
    nodes: Sequence[int]

    @property
    def instance_id(self) -> str:
        return f"{self.control.role}.{self.number}"

    async def train(self, ring: Ring, timeline: Timeline) -> None:
        config, control = self.config, self.control
        demonstrations = asyncio.create_task(self._demonstrate())
        try:
            async with self._engine() as engine:
                await unless_job_ends(control, demonstrations)
                meter = JobUsageMeter(control, config.judge.budget)
                async with EpisodeRunner.open(config, engine.processor, control.role, meter, True, timeline) as runner:
                    weights = WeightClient(config, control, engine, self.instance_id, timeline)
                    with closing(EpisodeStore.of_worker(config, control.role)) as store:
                        await RolloutPool(config, control, ring, engine, runner, weights, store, self.instance_id).run()
        except JobEnded:
            counts = {"instance_id": self.instance_id, "finished": 0, "unwritten": 0}
            control.put_json(f"final_counts/{control.role}", counts)
            raise
        finally:
            demonstrations.cancel()

    async def serve_weight_check(self) -> None:
        """Take offered weights, and report on the version to be checked."""
        config, control = self.config, self.control
        async with self._engine() as engine:
            weights, reported = WeightClient(config, control, engine, self.instance_id), False
            while True:
                control.check_job(("trainer-0",), config.trainer_grace_seconds)
                await weights.poll()
                if control.get_json("weights/check_version") == engine.version and not reported:
                    paths, sums = await engine.weight_load_paths(), await engine.weight_checksums()
                    control.put_json(f"weights/check_report/{control.role}", {"load_paths": paths, "checksums": sums})
                    reported = True
                control.report_status(f"version {engine.version}" if engine.version >= 0 else "waiting for weights")
                await asyncio.sleep(POLL_SECONDS)

    async def evaluate(self) -> None:
        """Evaluate the weights of model.path on request, without training."""
        async with self._engine() as engine:
            await run_evaluation_worker(self.config, self.control, engine, self.instance_id)

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[VLLMEngine]:
        """The engine, with its followers."""
        control, started, followers = self.control, time.monotonic(), None
        if len(self.nodes) > 1:
            names = ", ".join(map(str, self.nodes[1:]))
            control.report_status(f"waiting for the engine's followers on nodes {names}")
            followers = await EngineFollowers.start(self.config, control, self.index, self.number, self.nodes)
        control.report_status("starting the engine")
        starting = asyncio.create_task(VLLMEngine.start(self.config, self.index, self.number, followers))
        try:
            engine = await unless_job_ends(control, starting)
        finally:
            starting.cancel()  # no effect on a finished task
        log.info("engine started in %.1f s", time.monotonic() - started)
        try:
            yield engine
        finally:
            await engine.close()

    async def _demonstrate(self) -> None:
        """Record the demonstrations of a fresh run while the engine starts; only the first worker does."""
        config, control, settings = self.config, self.control, self.config.trainer.warm_start
        count = settings.demonstrations
        if self.index != 0 or not count or config.run.resume or control.get_json("demonstrations/ready"):
            return
        if not settings.demonstrations_file:
            started = time.monotonic()
            await write_demonstrations(
                config,
                count,
                config.demonstrations_path,
                lambda done: control.report_status(f"demonstrations, {done} of {count}"),
                f"{control.role}-demonstrations",
            )
            log.info("%d demonstrations in %.1f s", count, time.monotonic() - started)
        control.put_json("demonstrations/ready", True)


async def unless_job_ends(control: ControlClient, task: asyncio.Task[T]) -> T:
    """The result of a task. Raises JobEnded or JobFailed if the job ends meanwhile."""
    while not (await asyncio.wait({task}, timeout=JOB_END_POLL_SECONDS))[0]:
        if control.job_end() is not None:
            control.check_job()
    return await task
