"""Updates from real Megatron ranks to real engines under load, and trainers that are killed at random moments."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.weights.serving import (
    SECONDS,
    Served,
    Stage,
    changed_folders,
    check_answers,
    configuration,
    served,
)
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
UPDATES = 3


async def take_all_versions(stage: Stage, engines: Sequence[Served]) -> None:
    """Let the trainer send all versions; all engines answer after each."""
    for version in range(UPDATES + 1):
        if version:
            stage.control.put_json(f"go/{version}", True)
        done = await stage.until(lambda v=version: stage.control.get_json(f"sent/{v}"), f"version {version}")
        assert done["lost"] == 0, stage.logs()  # every checksum agreed, on both sides
        await stage.until(lambda v=version: all(e.engine.version == v for e in engines), "engines on it", 10)
        count = [len(e.answers) for e in engines]
        await stage.until(
            lambda c=count: all(len(e.answers) >= n + 4 for e, n in zip(engines, c, strict=True)), "answers"
        )


def check_all_answers(engines: Sequence[Served], folders: Sequence[Path], base: Path) -> None:
    """All tokens have the log-probabilities of their versions' weights."""
    for found in engines:
        assert not found.errors
        for _, answer in found.answers:
            assert (np.diff(answer.versions) >= 0).all()
        assert any(len(set(answer.versions)) > 1 for _, answer in found.answers)  # some span an update
        assert check_answers(found, folders, base) >= UPDATES


MODELS: dict[str, dict[str, Any]] = {
    "experts": {"experts": 4, "seed": 1},
    "hybrid": {"architecture": "qwen3_5", "tie": False},
}


@pytest.mark.parametrize("kind", MODELS)
async def test_a_2x2_trainer_updates_engines_of_one_and_two_ranks_under_load(tmp_path: Path, kind: str) -> None:
    model = make_tiny_model(tmp_path / "model", **MODELS[kind])
    config = configuration(tmp_path, model, engines=2, tensor_parallel=2, pipeline_parallel=2)
    scale = 0.02
    if kind == "hybrid":  # vLLM computes linear attention in bfloat16, whose errors grow with the weights
        config.rollout.dtype, scale = "bfloat16", 0.005
    folders = changed_folders(tmp_path, model, UPDATES, scale)
    stage = Stage(tmp_path, config)
    try:
        stage.start_trainer(folders)
        async with AsyncExitStack() as stack:
            sizes = [{}, {"tensor_parallel": 2}]
            engines = await asyncio.gather(
                *(stack.enter_async_context(served(stage, n, requests=4, **size)) for n, size in enumerate(sizes))
            )
            await take_all_versions(stage, engines)
            check_all_answers(engines, folders, model)
    finally:
        stage.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose transfer takes long enough to interrupt."""
    folder = tmp_path_factory.mktemp("killed") / "model"
    return make_tiny_model(folder, hidden=256, intermediate=1024, layers=6, heads=8, kv_heads=4, seed=5)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
async def test_an_engine_whose_trainer_is_killed_is_complete_or_paused_and_joins_the_next_trainer(
    tmp_path: Path, model: Path, kills: int
) -> None:
    draw = random.Random(11)
    config = configuration(tmp_path, model)
    config.weights.bucket_mib, config.weights.verify = 1, False  # many messages: a kill can fall between any two
    folders = changed_folders(tmp_path, model, UPDATES)
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
            before = len(found.answers)
            await stage.until(lambda: len(found.answers) >= before + 20, "answers")  # some have no text to check
            assert not found.errors
            assert check_answers(found, folders, model, newest=60) >= 10
    finally:
        stage.close()
    assert partial_updates


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
