"""Updates in flight from real Megatron ranks to real engines, of one size and of two."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.rollout.test_engine import expected, picture
from tests.weights.serving import Stage, changed_folders, configuration, gap, served

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
UPDATES = 3
TOLERANCE = 1e-4


def load(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["dense", pytest.param("experts", marks=pytest.mark.soak)])
async def test_two_by_two_trainer_ranks_keep_engines_of_one_and_two_ranks_up_to_date_under_load(
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
            for version in range(UPDATES + 1):
                if version:
                    stage.control.put(f"go/{version}", True)
                done = await stage.until(lambda v=version: stage.control.value(f"sent/{v}"), f"version {version}")
                assert done["lost"] == 0, stage.logs()  # every checksum agreed, on both sides
                await stage.until(lambda v=version: all(e.engine.version == v for e in engines), "engines on it", 10)
                count = [len(e.answers) for e in engines]
                await stage.until(
                    lambda c=count: all(len(e.answers) >= n + 4 for e, n in zip(engines, c, strict=True)), "answers"
                )
            exported = Path(await stage.until(lambda: stage.control.value("exported"), "the exported model"))
            final = load(exported)
            assert [await gap(e, final) < TOLERANCE for e in engines] == [True, True]
            models = [load(folder) for folder in (model, *folders)]
            for found in engines:
                assert not found.errors
                over = 0
                for number, answer in found.answers:
                    assert (np.diff(answer.versions) >= 0).all()
                    over += len(set(answer.versions)) > 1
                    if found.engine.processor.image_token_id in answer.response_token_ids:
                        continue  # transformers would take it for an image
                    for version in set(answer.versions):
                        mine = answer.versions == version
                        scores = expected(models[version], found.engine, answer, [picture(number)])
                        np.testing.assert_allclose(answer.logprobs[mine], scores[mine], atol=TOLERANCE)
                assert over  # answers went on over an update
    finally:
        stage.close()
