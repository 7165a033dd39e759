"""Start one rollout worker: demonstrations, engine, browsers, then the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TypeVar

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.judge.budget import JobUsageMeter
from megatron_webrl.ring.ring import NodeRing, Ring
from megatron_webrl.rollout.demonstrations import write_demonstrations
from megatron_webrl.rollout.engine.engine_leader import EngineFollowers
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.evaluator import Evaluator, run_evaluation_worker
from megatron_webrl.rollout.pool import RolloutPool, open_node_ring
from megatron_webrl.track.episodes import EpisodeStore
from megatron_webrl.track.timeline import Timeline, open_timeline

log = logging.getLogger(__name__)
T = TypeVar("T")

JOB_END_POLL_SECONDS = 1.0  # while the engine starts and demonstrations are recorded


def run(
    config: Config,
    control: ControlClient,
    worker: int,
    node_ring: NodeRing,
    nodes: Sequence[int] = (0,),
    weights_only: bool = False,
) -> None:
    """Run one worker until the job ends. Raises JobEnded if it ends before the pool has started.

    `nodes`: the engine's, the worker's first. There is neither a ring nor training with `weights_only`, for a check of
    the weight transfer, nor with evaluation.only.
    """
    control.start_heartbeat()
    number = control.register_instance()
    log.info("instance %d of this worker", number)
    try:
        if weights_only:
            asyncio.run(_serve_weight_check(config, control, worker, number, nodes))
        elif config.evaluation.only:
            asyncio.run(_evaluate(config, control, worker, number, nodes))
        else:
            with (
                open_timeline(config, control.role, nodes[0]) as timeline,
                open_node_ring(config, control, node_ring, first_instance=number == 1) as ring,
            ):
                asyncio.run(_run(config, control, worker, number, ring, nodes, timeline))
    finally:
        control.close()


async def _run(
    config: Config, control: ControlClient, worker: int, number: int, ring: Ring, nodes: Sequence[int],
    timeline: Timeline,
) -> None:  # fmt: skip
    instance_id = f"rollout-{worker}.{number}"
    demonstrations = asyncio.create_task(_demonstrate(config, control, worker))
    engine = None
    try:
        engine = await _start_engine(config, control, worker, number, nodes)
        await _unless_job_ends(control, demonstrations)
        meter = JobUsageMeter(control, config.judge.budget)
        async with EpisodeRunner.open(config, engine.processor, control.role, meter, True, timeline) as runner:
            weights = WeightClient(config, control, engine, worker, instance_id, timeline)
            with closing(EpisodeStore.of_worker(config, control.role)) as store:
                evaluator = Evaluator(config, control, engine, runner, store, instance_id)
                await RolloutPool(config, control, ring, engine, runner, weights, evaluator, store, instance_id).run()
    except JobEnded:
        counts = {"instance_id": instance_id, "finished": 0, "unwritten": 0}
        control.put_json(f"final_counts/rollout-{worker}", counts)
        raise
    finally:
        demonstrations.cancel()
        if engine is not None:
            await engine.close()


async def _serve_weight_check(
    config: Config, control: ControlClient, worker: int, number: int, nodes: Sequence[int]
) -> None:
    """Take offered weights, and report on the version to be checked. Raises JobEnded."""
    engine = await _start_engine(config, control, worker, number, nodes)
    try:
        weights = WeightClient(config, control, engine, worker, f"rollout-{worker}.{number}")
        reported = False
        while True:
            control.check_job(("trainer-0",), config.trainer_grace_seconds)
            await weights.poll()
            if control.get_json("weights/check_version") == engine.version and not reported:
                report = {"load_paths": await engine.weight_load_paths(), "checksums": await engine.weight_checksums()}
                control.put_json(f"weights/check_report/rollout-{worker}", report)
                reported = True
            control.report_status(f"version {engine.version}" if engine.version >= 0 else "waiting for weights")
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await engine.close()


async def _evaluate(config: Config, control: ControlClient, worker: int, number: int, nodes: Sequence[int]) -> None:
    """Evaluate the weights of model.path on request, without training. Raises JobEnded."""
    engine = await _start_engine(config, control, worker, number, nodes)
    try:
        await run_evaluation_worker(config, control, engine, f"{control.role}.{number}")
    finally:
        await engine.close()


async def _start_engine(
    config: Config, control: ControlClient, worker: int, number: int, nodes: Sequence[int]
) -> VLLMEngine:
    """Start the engine, with its followers. Raises JobEnded or JobFailed if the job ends meanwhile."""
    started, followers = time.monotonic(), None
    if len(nodes) > 1:
        control.report_status(f"waiting for the engine's followers on nodes {', '.join(map(str, nodes[1:]))}")
        followers = await EngineFollowers.start(config, control, worker, number, nodes)
    control.report_status("starting the engine")
    starting = asyncio.create_task(VLLMEngine.start(config, worker, number, followers))
    try:
        engine = await _unless_job_ends(control, starting)
    finally:
        starting.cancel()  # no effect on a finished task
    log.info("engine started in %.1f s", time.monotonic() - started)
    return engine


async def _unless_job_ends(control: ControlClient, task: asyncio.Task[T]) -> T:
    """The result of a task. Raises JobEnded or JobFailed if the job ends meanwhile."""
    while not (await asyncio.wait({task}, timeout=JOB_END_POLL_SECONDS))[0]:
        if control.job_end() is not None:
            control.check_job()
    return await task


async def _demonstrate(config: Config, control: ControlClient, worker: int) -> None:
    """Record the demonstrations of a fresh run while the engine starts; only the first worker does."""
    count = config.trainer.warm_start.demonstrations
    if worker != 0 or not count or config.run.resume or control.get_json("demonstrations/ready"):
        return
    if config.trainer.warm_start.demonstrations_file:
        control.put_json("demonstrations/ready", True)
        return
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
