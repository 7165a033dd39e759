"""A float32 head: engine and trainer compute the same logits of a bfloat16 model, after an update in flight too.

Attention and MLP add nothing to the residual stream of the model, so that no other rounding hides that of the logits.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.trainer.data.batching import TrainingSample
from tests.rollout.engine import engines
from tests.trainer.ranks import process_groups, results
from tests.trajectories import trajectory
from tools.bench.routing_replay import _step, samples_of
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.engine]
SCALE = 16.0  # of the logits, whose standard deviation is then 3.6


def write_model(folder: Path) -> None:
    make_tiny_model(folder, tie=False)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "mlp.down_proj.weight")):
            tensor.zero_()
    tensors["model.language_model.norm.weight"].fill_(SCALE)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


async def converse(folder: Path) -> list[TrainingSample]:
    """Responses that version 0 begins and version 1, whose head is another, ends; its weights are in `folder`/final."""
    config = engines.configuration(folder / "model")
    config.model.dtype, config.model.head_dtype = "bfloat16", "float32"
    config.rollout.max_new_tokens, config.run.startup_timeout_seconds = 64, 400.0
    engine = await VLLMEngine.start(config, 0)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    sender = engines.Sender(model, folder, torch.bfloat16)
    try:
        await sender.join(engine)
        await sender.send(engine, 0)
        tokens = engines.prompt(engine, 0)
        running = [asyncio.create_task(engines.respond(engine, tokens, [])) for _ in range(4)]
        while engines.tokens_in_flight(engine) < 8:
            await asyncio.sleep(0.01)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(1, dims=0))
        await sender.send(engine, 1)
        answers = await asyncio.gather(*running)
    finally:
        await engine.close()
    shutil.copytree(folder / "model", folder / "final")
    model.save_pretrained(folder / "final")
    given = [replace(_step(answer), images=np.zeros(0, np.int32)) for answer in answers]
    return samples_of([replace(trajectory(number, 0), steps=(step,), images=()) for number, step in enumerate(given)])


def score(platform: Any, _: Path, folder: Path) -> dict[bool, list[torch.Tensor]]:
    """Differences of version 1's log-probabilities, by whether the trainer's head is float32."""
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.model.layout import ParallelSizes
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs
    from megatron_webrl.trainer.main import make_sequence_packer

    samples, found = pickle.loads((folder / "samples.pickle").read_bytes()), {}
    config = engines.configuration(folder / "final")
    with process_groups(ParallelSizes()), torch.no_grad():
        batches = make_sequence_packer(config, platform).build(samples, "token_mean", 1)
        for float32 in (False, True):
            options = ComputeOptions(float32_head=float32)
            [model] = build_model(folder / "final", dtype="bfloat16", platform=platform, options=options)
            load_hf([model], folder / "final")
            found[float32] = list[torch.Tensor]()
            for batch in batches:
                vocabulary = model.unpadded_vocab_size
                logprobs, _ = vocab_parallel_logprobs(model(batch.inputs), batch.targets, 1.0, vocabulary, None)
                found[float32].append((logprobs - batch.behaviour_logprobs)[batch.versions == 1].abs())
    return found


def test_engine_and_trainer_agree_where_rounded_logits_do_not(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    samples = asyncio.run(converse(tmp_path))
    (tmp_path / "samples.pickle").write_bytes(pickle.dumps(samples))
    [found] = results(score, tmp_path / "ranks", tmp_path, ranks=1)
    rounded, exact = (torch.cat(found[float32]) for float32 in (False, True))
    assert len(exact) > 40
    assert rounded.mean() > 5e-3
    assert exact.max() < 1e-4
