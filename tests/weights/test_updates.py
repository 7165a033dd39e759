"""Updates from real Megatron ranks to real engines under load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.weights.serving import Served, Stage, changed_folders, check_answers, configuration, served
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
UPDATES = 3


async def take_all_versions(stage: Stage, engines: Sequence[Served]) -> None:
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


async def test_the_trainer_does_not_wait_for_an_engine_whose_worker_restarted(tmp_path: Path) -> None:
    """The other worker was given up before the first update: the plan has one engine, and it is that of rollout-1."""
    model = make_tiny_model(tmp_path / "model")
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
