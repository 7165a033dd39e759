"""Updates from real Megatron ranks to real engines under load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.weights.serving import (
    Served,
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
    "dense": {},
    "experts": {"experts": 4, "seed": 1},
    "hybrid": {"architecture": "qwen3_5", "tie": False},
}


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.soak) for kind in ("dense", "experts")), "hybrid"]
)
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
            exported = Path(await stage.until(lambda: stage.control.get_json("exported"), "the exported model"))
            final = load(exported)
            for found in engines:
                await check_fresh_answers(found, final)
            check_all_answers(engines, folders, model)
    finally:
        stage.close()


@pytest.mark.soak  # tests/rollout/engine/test_followers.py updates one over two nodes
async def test_an_engine_of_two_pipeline_stages_serves_before_and_after_updates(
    tmp_path: Path, tiny_model: Path
) -> None:
    folders = changed_folders(tmp_path, tiny_model, UPDATES)
    stage = Stage(tmp_path, configuration(tmp_path, tiny_model))
    try:
        stage.start_trainer(folders)
        async with served(stage, 0, requests=4, pipeline_parallel=2) as found:
            await take_all_versions(stage, [found])
            await check_fresh_answers(found, load(folders[-1]))
            check_all_answers([found], folders, tiny_model)
    finally:
        stage.close()
