"""One rollout worker, from nothing to the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import POLL_SECONDS, ControlClient, JobEnded
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.demonstrations import write_demonstrations
from megatron_webrl.rollout.engine.engine_leader import EngineFollowers
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.evaluator import Evaluator, run_evaluation_worker
from megatron_webrl.rollout.pool import RolloutPool
from megatron_webrl.rollout.ring_lifetime import open_node_ring
from megatron_webrl.sampling.states import SamplerStateReader

log = logging.getLogger(__name__)

JOB_END_POLL_SECONDS = 1.0  # between looks whether the job has ended, while the engine starts


def run(
    config: Config,
    control: ControlClient,
    worker: int,
    place: NodeRing,
    only: str | None = None,
    nodes: Sequence[int] = (0,),
) -> None:
    """Run one worker until the job has ended; raises Stopped if it ends before the pool has begun.

    `nodes`: over which its engine lies, the worker's first; with several, part.py runs on the others.
    `only` = "weights": no browsers, no episodes, no ring; "evaluation": no trainer, no training episodes, no ring.
    """
    control.start_heartbeat()
    life = control.register_instance()
    log.info("life %d of this worker", life)
    try:
        if only == "weights":
            asyncio.run(_take_weights(config, control, worker, life, nodes))
        elif only == "evaluation":
            asyncio.run(run_evaluation_worker(config, control, worker, life))
        else:
            with open_node_ring(config, control, place, first_instance=life == 1) as ring:
                asyncio.run(_run(config, control, worker, life, ring, nodes))
    finally:
        control.close()


async def _run(
    config: Config, control: ControlClient, worker: int, life: int, ring: Ring, nodes: Sequence[int]
) -> None:
    name = f"rollout-{worker}.{life}"
    demonstrations = asyncio.create_task(_demonstrate(config, control, worker))
    engine = None
    try:
        engine = await _start_engine(config, control, worker, life, nodes)
        await demonstrations
        states = SamplerStateReader.from_config(config, control)
        async with EpisodeRunner.open(config, engine.processor, control.role, states) as episodes:
            refresh = WeightClient(config, control, engine, worker, name)
            evaluator = Evaluator(config, control, engine, episodes, name)
            await RolloutPool(config, control, ring, engine, episodes, refresh, evaluator, name).run()
    except JobEnded:
        control.put_json(f"final_counts/rollout-{worker}", {"instance_id": name, "finished": 0, "unwritten": 0})
        raise
    finally:
        demonstrations.cancel()
        if engine is not None:
            await engine.close()


async def _take_weights(config: Config, control: ControlClient, worker: int, life: int, nodes: Sequence[int]) -> None:
    """Take whatever weights are offered. Raises Stopped at the end of the job."""
    engine = await _start_engine(config, control, worker, life, nodes)
    try:
        refresh = WeightClient(config, control, engine, worker, f"rollout-{worker}.{life}")
        told = False
        while True:
            control.check_job(("trainer-0",), config.trainer_grace_seconds)
            await refresh.poll()
            if control.get_json("weights/check_version") == engine.version and not told:
                found = {"load_paths": await engine.weight_load_paths(), "checksums": await engine.weight_checksums()}
                control.put_json(f"weights/check_report/rollout-{worker}", found)
                told = True
            control.report_status(f"version {engine.version}" if engine.version >= 0 else "waiting for weights")
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await engine.close()


async def _start_engine(
    config: Config, control: ControlClient, worker: int, life: int, nodes: Sequence[int]
) -> VLLMEngine:
    """Raises Stopped or JobFailed if the job ends meanwhile."""
    started, parts = time.monotonic(), None
    if len(nodes) > 1:
        control.report_status(f"waiting for the parts of the engine on nodes {', '.join(map(str, nodes[1:]))}")
        parts = await EngineFollowers.start(config, control, worker, life, nodes)
    control.report_status("starting the engine")
    starting = asyncio.create_task(VLLMEngine.start(config, worker, life, parts))
    try:
        while not (await asyncio.wait({starting}, timeout=JOB_END_POLL_SECONDS))[0]:
            if control.job_end() is not None:
                control.check_job()
    finally:
        starting.cancel()  # which does nothing to one that is done
    engine = await starting
    log.info("engine started in %.1f s", time.monotonic() - started)
    return engine


async def _demonstrate(config: Config, control: ControlClient, worker: int) -> None:
    """Make the demonstrations of a fresh run while the engine starts; the first worker makes them for all."""
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
