"""Updates from real Megatron ranks to real engines under load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.weights.serving import (
    TOLERANCE,
    Served,
    Stage,
    changed_folders,
    check_answers,
    configuration,
    gap,
    load,
    served,
)

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


@pytest.mark.parametrize("kind", ["dense", pytest.param("experts", marks=pytest.mark.soak)])
async def test_a_2x2_trainer_updates_engines_of_one_and_two_ranks_under_load(
    tmp_path: Path, tiny_model: Path, tiny_sparse_model: Path, kind: str
) -> None:
    model = tiny_model if kind == "dense" else tiny_sparse_model
    config = configuration(tmp_path, model, engines=2, tensor_parallel=2, pipeline_parallel=2)
    folders = changed_folders(tmp_path, model, UPDATES)
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
            assert [await gap(e, final) < TOLERANCE for e in engines] == [True, True]
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
            assert await gap(found, load(folders[-1])) < TOLERANCE
            check_all_answers([found], folders, tiny_model)
    finally:
        stage.close()
