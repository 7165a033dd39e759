"""One rollout worker, from nothing to the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from megatron_webrl.config import Config
from megatron_webrl.control import POLL_SECONDS, Control, Stopped
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.demonstrate import demonstrate
from megatron_webrl.rollout.engine import Engine
from megatron_webrl.rollout.episodes import Episodes
from megatron_webrl.rollout.evaluation import Evaluator, serve
from megatron_webrl.rollout.held_ring import held_ring
from megatron_webrl.rollout.parts import Parts
from megatron_webrl.rollout.pool import Pool
from megatron_webrl.rollout.refresh import Refresh
from megatron_webrl.sampling.states import PublishedStates

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between looks whether the job has ended, while the engine starts


def run(
    config: Config,
    control: Control,
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
    life = control.begin_life()
    log.info("life %d of this worker", life)
    try:
        if only == "weights":
            asyncio.run(_take_weights(config, control, worker, life, nodes))
        elif only == "evaluation":
            asyncio.run(serve(config, control, worker, life))
        else:
            with held_ring(config, control, place, first=life == 1) as ring:
                asyncio.run(_run(config, control, worker, life, ring, nodes))
    finally:
        control.close()


async def _run(config: Config, control: Control, worker: int, life: int, ring: Ring, nodes: Sequence[int]) -> None:
    name = f"rollout-{worker}.{life}"
    demonstrations = asyncio.create_task(_demonstrate(config, control, worker))
    engine = None
    try:
        engine = await _start_engine(config, control, worker, life, nodes)
        await demonstrations
        states = PublishedStates.of(config, control)
        async with Episodes.open(config, engine.processor, control.role, states) as episodes:
            refresh = Refresh(config, control, engine, worker, name)
            evaluator = Evaluator(config, control, engine, episodes, name)
            await Pool(config, control, ring, engine, episodes, refresh, evaluator, name).run()
    except Stopped:
        control.put(f"final/rollout-{worker}", {"life": name, "finished": 0, "held": 0})
        raise
    finally:
        demonstrations.cancel()
        if engine is not None:
            await engine.close()


async def _take_weights(config: Config, control: Control, worker: int, life: int, nodes: Sequence[int]) -> None:
    """Take whatever weights are offered. Raises Stopped at the end of the job."""
    engine = await _start_engine(config, control, worker, life, nodes)
    try:
        refresh = Refresh(config, control, engine, worker, f"rollout-{worker}.{life}")
        told = False
        while True:
            control.check(("trainer-0",), config.trainer_patience)
            await refresh.step()
            if control.value("weights/asked") == engine.version and not told:
                found = {"ways": await engine.weight_ways(), "sums": await engine.weight_sums()}
                control.put(f"weights/found/rollout-{worker}", found)
                told = True
            control.report(f"version {engine.version}" if engine.version >= 0 else "waiting for weights")
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await engine.close()


async def _start_engine(config: Config, control: Control, worker: int, life: int, nodes: Sequence[int]) -> Engine:
    """Raises Stopped or JobFailed if the job ends meanwhile."""
    started, parts = time.monotonic(), None
    if len(nodes) > 1:
        control.report(f"waiting for the parts of the engine on nodes {', '.join(map(str, nodes[1:]))}")
        parts = await Parts.call(config, control, worker, life, nodes)
    control.report("starting the engine")
    starting = asyncio.create_task(Engine.start(config, worker, life, parts))
    try:
        while not (await asyncio.wait({starting}, timeout=LOOK_SECONDS))[0]:
            if control.end() is not None:
                control.check()
    finally:
        starting.cancel()  # which does nothing to one that is done
    engine = await starting
    log.info("engine started in %.1f s", time.monotonic() - started)
    return engine


async def _demonstrate(config: Config, control: Control, worker: int) -> None:
    """Make the demonstrations of a fresh run while the engine starts; the first worker makes them for all."""
    count = config.trainer.warm_start.demonstrations
    if worker != 0 or not count or config.run.resume or control.value("demonstrations/ready"):
        return
    if config.trainer.warm_start.file:
        control.put("demonstrations/ready", True)
        return
    started = time.monotonic()
    await demonstrate(
        config,
        count,
        config.demonstrations_path,
        lambda done: control.report(f"demonstrations, {done} of {count}"),
        f"{control.role}-demonstrations",
    )
    log.info("%d demonstrations in %.1f s", count, time.monotonic() - started)
    control.put("demonstrations/ready", True)
