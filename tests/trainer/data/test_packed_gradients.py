"""Log-probabilities and gradients of a real model do not depend on packing, merging and common prefixes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_webrl.config.schema import Config
from megatron_webrl.model import schedule
from megatron_webrl.model.build import build_model, load_hf
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.logprobs import vocab_parallel_logprobs
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.main import compute_options, make_sequence_packer
from tests.model.layout_ranks import wrap
from tests.trainer.growing_prompts import SIZES, random_tokens, step
from tests.trainer.ranks import process_groups, results
from tests.trajectories import screenshot

TREE: dict[str, Any] = {"merge_prefixes": "all", "min_shared_tokens": 2}
WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"merge_prefixes": "none", "microbatch_multiple": 7},
    "packed, three replicas of two rows": {"merge_prefixes": "none", "data_parallel_size": 3, "microbatch_multiple": 2},
    "merged": {"merge_prefixes": "trajectory"},
    "merged, more rows than samples": {
        "merge_prefixes": "trajectory", "data_parallel_size": 2, "microbatch_multiple": 4,
    },
    "tree": TREE,
    "tree, two replicas": TREE | {"max_tokens": 200, "data_parallel_size": 2},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2, sequence parallel": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2, "recompute": "full"},
    "dp2": {"data_parallel": 2, "recompute": "selective"},
}


def group_samples(processor: Processor) -> list[TrainingSample]:
    """Seven steps of a group of four: the first prompt, with a screenshot, is that of all; responses branch at once.

    Of two equal first responses, one is extended with another screenshot and one with its thought left out.
    """
    shots = [screenshot(seed, *SIZES[seed % 3]) for seed in range(3)]
    grids = processor.grids(shots)
    places = [np.full(int(grid.prod()) // processor.merge_size**2, processor.image_token_id) for grid in grids]
    prompt = np.concatenate([random_tokens(1, 9), places[0], random_tokens(2, 6)]).astype(np.int32)
    responses = [random_tokens(seed, 5) for seed in (3, 4, 4, 4)]  # the first differs from its first token on
    responses[3] = np.append(responses[1][:3], random_tokens(5, 2))
    steps = [
        step(prompt, response, images=(shots[0],), grids=grids[:1], trajectory=(1, i), advantage=0.5 - i, first=100 * i)
        for i, response in enumerate(responses)
    ]
    for index, kept in ((1, responses[1]), (2, responses[2][3:]), (1, responses[1][:2])):
        longer = np.concatenate([prompt, kept, places[index], random_tokens(6, 4)]).astype(np.int32)
        images, response = (shots[0], shots[index]), random_tokens(7 + len(steps), 6)
        given = {"images": images, "grids": grids[[0, index]], "trajectory": (1, index), "first": 1000 * len(steps)}
        steps.append(step(longer, response, **given))
    return steps


def run(platform: Any, _: Path, model: Path) -> dict[str, dict[str, Any]]:
    """Log-probabilities, gradients, and numbers of micro-batches and tokens, for each way of packing."""
    processor, cost = Processor.load(model), FlopsEstimator.from_hf_config(load_hf_config(model))
    with process_groups(ParallelSizes()):
        (chunk,) = build_model(str(model), dtype="float64", platform=platform)
        fill(chunk)
        samples = group_samples(processor)
        return {way: _examine(chunk, processor, cost, samples, options) for way, options in WAYS.items()}


def fill(model: Any) -> None:
    """Random weights under which activations and logits are of size one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.1)


def _examine(
    model: Any, processor: Processor, cost: FlopsEstimator, samples: list[TrainingSample], way: dict[str, Any]
) -> dict[str, Any]:
    options = {"data_parallel_size": 1, "max_tokens": 1000} | way
    model.zero_grad()
    tokens, rows, marks, scores = 0, [], [], []
    for replica in range(options["data_parallel_size"]):
        packer = SequencePacker(
            processor, device=torch.device("cpu"), flops_estimator=cost, data_parallel_rank=replica, **options
        )
        built = packer.build(samples, "per_trajectory", 10)
        rows.append(len(built))
        for batch in built:
            logits = model(batch.inputs)[:, : model.unpadded_vocab_size] / batch.temperature
            logprobs = logits.log_softmax(dim=1).gather(1, batch.targets[:, None])[:, 0]  # the trainer's are in float32
            (batch.weight * batch.advantage * logprobs).sum().backward()
            real = batch.weight > 0
            tokens += batch.token_count * bool(real.any())
            marks.append(batch.behaviour_logprobs[real])
            scores.append(logprobs.detach()[real])
    order = torch.cat(marks).argsort()
    gradients: dict[str, Tensor] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"marks": torch.cat(marks)[order], "logprobs": torch.cat(scores)[order], "gradients": gradients,
            "tokens": tokens, "rows": rows}  # fmt: skip


def test_log_probabilities_and_gradients_are_those_of_samples_one_by_one(tmp_path: Path, tiny_model: Path) -> None:
    (ways,) = results(run, tmp_path, tiny_model, ranks=1)
    alone = ways["one by one"]
    whole = torch.stack([gradient.norm() for gradient in alone["gradients"].values()]).norm()
    assert len(alone["marks"]) == len(alone["marks"].unique())
    assert any("visual" in name for name in alone["gradients"])
    for way, other in ways.items():
        assert torch.equal(alone["marks"], other["marks"]), way
        assert ((alone["logprobs"] - other["logprobs"]) / alone["logprobs"]).abs().max() < 1e-12, way
        assert alone["gradients"].keys() == other["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            assert gradient.norm() > 0
            difference = (gradient - other["gradients"][name]).norm()
            assert difference < 1e-6 * gradient.norm(), (way, name)  # the norms of gradients are not in float64
            assert difference < 1e-6 * whole, (way, name)
    assert [ways[way]["rows"] for way in WAYS][:5] == [[7], [2, 2, 2], [1], [4, 4], [1]]
    assert ways["tree"]["tokens"] < ways["merged"]["tokens"] < alone["tokens"]


def in_layouts(platform: Any, _: Path, model: Path) -> dict[str, dict[str, Any]]:
    """Layout -> what is merged -> this rank's computed tokens, log-probabilities and gradients."""
    found: dict[str, dict[str, Any]] = {}
    for name, layout in LAYOUTS.items():
        config = Config()
        config.model.path, config.trainer.tokens_per_microbatch = str(model), 200
        for key, value in layout.items():
            setattr(config.trainer, key, value)
        with process_groups(config):
            options = compute_options(config, platform)
            chunks = build_model(model, dtype="float32", platform=platform, options=options)
            load_hf(chunks, model)
            wrapped = wrap(chunks)
            found[name] = {merged: _pass(config, wrapped, merged, platform) for merged in ("none", "all")}
    return found


def _pass(config: Config, wrapped: list[Any], merged: str, platform: Any) -> dict[str, Any]:
    chunks, trainer = [each.module for each in wrapped], config.trainer
    trainer.merge_prefixes = merged
    packer = replace(make_sequence_packer(config, platform), min_shared_tokens=2)
    batches = packer.build(group_samples(packer.processor), "token_mean", 1)
    scores: dict[float, float] = {}  # a token is named by its behaviour log-probability

    def loss_of(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch, vocabulary = batches[index], chunks[-1].unpadded_vocab_size
        logprobs, _ = vocab_parallel_logprobs(logits, batch.targets, 1.0, vocabulary, chunks[-1].pg_collection.tp)
        scores.update(zip(batch.behaviour_logprobs.tolist(), logprobs.tolist(), strict=True))
        loss = (batch.weight * batch.advantage * logprobs).sum()
        return loss * len(batches) * trainer.data_parallel, {}  # Megatron averages over micro-batches and replicas

    for each in wrapped:
        each.zero_grad_buffer()
    schedule.forward_backward(wrapped, [batch.inputs for batch in batches], loss_of, forward_only=False)
    gradients = {n: p.main_grad.clone() for chunk in chunks for n, p in chunk.named_parameters()}
    return {"tokens": sum(batch.token_count for batch in batches), "scores": scores, "gradients": gradients}


def test_a_common_prefix_is_computed_once_with_the_same_result_in_every_layout(
    tmp_path: Path, tiny_model: Path
) -> None:
    ranks = results(in_layouts, tmp_path, tiny_model)
    expected = {mark: score for rank in ranks for mark, score in rank["dp2"]["all"]["scores"].items()}
    assert len(expected) > 20
    for layout in LAYOUTS:
        separate, trees = ([rank[layout][merged] for rank in ranks] for merged in ("none", "all"))
        assert sum(rank["tokens"] for rank in trees) < 0.6 * sum(rank["tokens"] for rank in separate)
        for one, other in zip(separate, trees, strict=True):
            assert one["gradients"].keys() == other["gradients"].keys()
            whole = torch.stack([gradient.norm() for gradient in one["gradients"].values()]).norm()
            assert whole > 0
            for name, gradient in one["gradients"].items():
                assert (gradient - other["gradients"][name]).norm() < 1e-6 * whole, (layout, name)
        alone, found = ({m: s for rank in each for m, s in rank["scores"].items()} for each in (separate, trees))
        assert found == {mark: pytest.approx(score, rel=1e-6) for mark, score in alone.items()}, layout
        assert found == {mark: pytest.approx(score, rel=1e-5) for mark, score in expected.items()}, layout
