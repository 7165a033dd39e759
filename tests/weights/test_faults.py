"""Trainers and real engines killed at random moments: no process hangs, and no partially updated engine serves."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_webrl.rollout.generator import EngineDeadError
from tests.weights.serving import (
    SECONDS,
    Stage,
    changed_folders,
    check_answers,
    check_fresh_answers,
    configuration,
    load,
    served,
)
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
VERSIONS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose transfer takes long enough to interrupt."""
    folder = tmp_path_factory.mktemp("faults") / "model"
    return make_tiny_model(folder, hidden=256, intermediate=1024, layers=6, heads=8, kv_heads=4, seed=5)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.soak)])
async def test_an_engine_whose_trainer_is_killed_is_complete_or_paused_and_joins_the_next_trainer(
    tmp_path: Path, model: Path, kills: int
) -> None:
    draw = random.Random(11)
    config = configuration(tmp_path, model)
    config.weights.bucket_mib, config.weights.verify = (
        1,
        False,
    )  # many messages, so that a kill can fall between any two
    folders = changed_folders(tmp_path, model, VERSIONS)
    stage, partial_updates = Stage(tmp_path, config), 0
    stage.control.put_json("go/forever", True)
    try:
        async with served(stage, 0, requests=3) as found:
            for kill in range(kills):
                link_id = found.weight_client.link_id
                stage.start_trainer(folders)
                await stage.until(lambda was=link_id: found.weight_client.link_id != was, "a new link")
                await stage.until(
                    lambda: found.engine.version >= 1 and not found.engine.partially_updated, "the trainer's weights"
                )
                if kill % 2:
                    await stage.until(lambda: found.engine.partially_updated, "the middle of a transfer")
                else:
                    await asyncio.sleep(draw.uniform(0, 0.5))
                stage.kill_trainer()
                killed = time.monotonic()
                link_id = found.weight_client.link_id
                # Within the timeout the engine is either partially updated and paused, or complete and serving.
                await stage.until(lambda: not found.engine._update.locked(), "the end of the transfer", SECONDS + 5)
                partial_updates += found.engine.partially_updated
                if found.engine.partially_updated:
                    assert time.monotonic() - killed < SECONDS
                    assert found.weight_client.link_id == link_id
                    answers = len(found.answers)
                    await asyncio.sleep(0.5)
                    assert len(found.answers) == answers
                    assert found.engine._llm.output_processor.has_unfinished_requests()  # kept, not lost
            stage.control.put_json("go/forever", None)
            stage.start_trainer([])
            await stage.until(
                lambda: found.engine.version == 0 and not found.engine.partially_updated, "complete weights"
            )
            await check_fresh_answers(found, load(model))
            await stage.until(lambda: len(found.answers) >= 30, "answers")
            assert not found.errors
            assert check_answers(found, folders, model, newest=60) >= 10
    finally:
        stage.close()
    assert partial_updates


@pytest.mark.soak  # tests/rollout/engine/test_followers.py kills one, tests/launch/test_job_failures.py in a job
@pytest.mark.parametrize("kills", [1, 20])
async def test_a_killed_engine_blocks_no_one_and_restarts_with_complete_weights(
    tmp_path: Path, model: Path, kills: int
) -> None:
    draw = random.Random(12)
    config = configuration(tmp_path, model, engines=2, tensor_parallel=2)
    # Short answers: with continuous updates, requests mostly recompute their contexts.
    config.weights.bucket_mib, config.rollout.max_new_tokens = 1, 30
    folders = changed_folders(tmp_path, model, VERSIONS)
    stage = Stage(tmp_path, config)
    stage.control.put_json("go/forever", True)
    try:
        async with served(stage, 0, requests=2) as steady:
            stage.start_trainer(folders)
            for kill in range(kills + 1):
                before = set(psutil.Process().children(recursive=True))
                async with served(stage, 1, requests=2) as doomed:
                    await stage.until(lambda d=doomed: d.engine.version >= 0, "the engine's first weights")
                    if kill == kills:
                        assert check_answers(steady, folders, model, newest=60) >= 2
                        break
                    await stage.until(lambda d=doomed: d.engine.partially_updated, "a transfer")
                    await asyncio.sleep(draw.uniform(0, 0.2))
                    for process in set(psutil.Process().children(recursive=True)) - before:
                        process.kill()
                    reached = steady.engine.version
                    await stage.until(
                        lambda r=reached: steady.engine.version >= r + 2, "the other's next versions", SECONDS + 10
                    )
                    with pytest.raises(EngineDeadError):
                        await doomed.engine.generate(None, np.zeros(3, np.int32), [])
                    doomed.dead = True
            assert not steady.errors
    finally:
        stage.close()


async def test_the_trainer_does_not_wait_for_an_engine_whose_worker_restarted(tmp_path: Path, model: Path) -> None:
    """The other worker was given up before the first update: the plan has one engine, and it is that of rollout-1."""
    config = configuration(tmp_path, model, engines=2)
    config.weights.timeout_seconds = config.run.heartbeat_timeout_seconds = 300.0
    stage = Stage(tmp_path, config)
    stage.control.give_up_worker("rollout-0", "its GPU is gone")
    try:
        async with served(stage, 1, requests=0) as found:
            stage.start_trainer(changed_folders(tmp_path, model, 1))
            await stage.until(lambda: found.engine.version == 0, "the engine's first weights")
            await stage.until(lambda: stage.control.get_json("sent/0"), "the end of the first update")
        stage.control.clear_heartbeat("rollout-1")
        offered = stage.control.get_json("weights/offer")
        stage.control.put_json("go/1", True)
        await stage.until(lambda: stage.control.get_json("weights/offer") != offered, "the next offer", 30)
        assert stage.connect("rollout-1").register_instance() == 2
        sent = await stage.until(lambda: stage.control.get_json("sent/1"), "an update without the engine", 30)
        assert sent["lost"] == 1
    finally:
        stage.close()
