"""One rollout worker, from nothing to the pool."""

from __future__ import annotations

import asyncio
import json
import logging
import time

from megatron_webrl.config import Config
from megatron_webrl.control import Control
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.demonstrate import demonstrate
from megatron_webrl.rollout.engine import Engine
from megatron_webrl.rollout.episodes import Episodes
from megatron_webrl.rollout.pool import Pool
from megatron_webrl.weights.manifest import Manifest

log = logging.getLogger(__name__)


def run(config: Config, control: Control, worker: int, ring_name: str) -> None:
    """Run one worker until the job has ended."""
    control.start_heartbeat()
    with Ring.create_or_attach(ring_name, config.ring.mib * 2**20, ring_name) as ring:
        asyncio.run(_run(config, control, worker, ring))
    control.close()


async def _run(config: Config, control: Control, worker: int, ring: Ring) -> None:
    demonstrations = asyncio.create_task(_demonstrate(config, control, worker))
    engine = None
    try:
        engine = await _start_engine(config, control, worker)
        await demonstrations
        async with Episodes.open(config, engine.processor) as episodes:
            await _join_weights(config, control, worker, engine)
            await Pool(config, control, ring, engine, episodes, f"rollout-{worker}").run()
    finally:
        demonstrations.cancel()
        if engine is not None:
            await engine.close()


async def _start_engine(config: Config, control: Control, worker: int) -> Engine:
    control.report("starting the engine")
    started = time.monotonic()
    engine = await Engine.start(config, worker)
    log.info("engine started in %.1f s", time.monotonic() - started)
    return engine


async def _demonstrate(config: Config, control: Control, worker: int) -> None:
    """Make the demonstrations of a fresh run while the engine starts; the first worker makes them for all."""
    count = config.trainer.warm_start.demonstrations
    if worker != 0 or not count or config.run.resume:
        return
    started = time.monotonic()
    await demonstrate(
        config, count, config.demonstrations_path, lambda done: control.report(f"demonstrations, {done} of {count}")
    )
    log.info("%d demonstrations in %.1f s", count, time.monotonic() - started)
    control.put("demonstrations/ready", True)


async def _join_weights(config: Config, control: Control, worker: int, engine: Engine) -> None:
    """Meet the trainer for weight transfers, once it is ready for them."""
    control.report("waiting for the trainer")
    limit = config.run.start_seconds + (
        config.trainer.warm_start.seconds if config.trainer.warm_start.demonstrations else 0
    )
    text = await asyncio.to_thread(
        control.wait_key, "weights/manifest", limit, "the trainer to offer its weights", ("trainer-0",)
    )
    first_rank = 1 + worker * config.rollout.tensor_parallel
    await engine.join_weights(
        control.host, control.port, first_rank, config.transfer_ranks, Manifest.from_json(json.loads(text))
    )
