"""Process of the packing tests: the same samples, packed in several ways, through a real model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import make_context
from megatron_webrl.rollout.demonstrations import scripted_generation
from megatron_webrl.rollout.toolset import format_tool_call
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.types import Action, Observation
from tests.gloo import join
from tests.trainer.growing_prompts import SIZES, episode, random_tokens, step
from tests.trajectories import screenshot

LIMIT = 130
WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"merge_prefixes": "none", "microbatch_multiple": 9},
    "packed": {"merge_prefixes": "none"},
    "merged": {"merge_prefixes": "trajectory"},
    "merged, one row": {"merge_prefixes": "trajectory", "max_tokens": 400},
    "merged, two replicas": {"merge_prefixes": "trajectory", "data_parallel_size": 2},
    "packed, three replicas of two rows": {"merge_prefixes": "none", "data_parallel_size": 3, "microbatch_multiple": 2},
    "merged, more rows than samples": {
        "merge_prefixes": "trajectory",
        "data_parallel_size": 2,
        "microbatch_multiple": 4,
    },
}
APPENDED_WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"merge_prefixes": "none", "max_tokens": 1000, "microbatch_multiple": 5},
    "merged": {"merge_prefixes": "trajectory", "max_tokens": 1000},
}
TREE_WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"merge_prefixes": "none", "max_tokens": 1000, "microbatch_multiple": 7},
    "packed": {"merge_prefixes": "none", "max_tokens": 1000},
    "merged": {"merge_prefixes": "trajectory", "max_tokens": 1000},
    "tree": {"merge_prefixes": "all", "min_shared_tokens": 2, "max_tokens": 1000},
    "tree, two replicas": {"merge_prefixes": "all", "min_shared_tokens": 2, "max_tokens": 200, "data_parallel_size": 2},
}


def make_samples(processor: Processor) -> list[TrainingSample]:
    """Nine steps of four episodes: three episodes grow, one step extends no other; screenshots are shared."""
    first, second = episode(processor, 0, (6, 2, 9)), episode(processor, 1, (3, 8), images=1, advantage=-0.5)
    third, fourth = episode(processor, 2, (5, 1, 4, 2), images=1, advantage=0.3), episode(processor, 3, (7, 7))
    return [*first, *second, *third[:3], fourth[1]]


def appended_samples(processor: Processor) -> list[TrainingSample]:
    """Five steps of an episode with prompts of the append policy: segments of three and of two."""
    settings = ContextConfig(policy="append", history_turns=3, compact=True)
    context = make_context(processor, settings, 1000)
    pages = [Observation(screenshot(n, *SIZES[n % 3]), f"http://a/{n}", f"Page {n}", True) for n in range(6)]
    context.start_episode("Click the button.", pages[0])
    samples = []
    for number, page in enumerate(pages[1:]):
        prompt = context.build_prompt()
        images = tuple(context.screenshots[i] for i in prompt.image_indices)
        click = Action("left_click", (100 * number, 500))
        generation = scripted_generation(
            processor, prompt.token_ids, images, f"<think>it is {number}</think>\n{format_tool_call(click)}"
        )
        if number == 1:  # cut off: it has no end token
            generation = replace(generation, response_token_ids=generation.response_token_ids[:-1])
        samples.append(
            step(
                generation.prompt_token_ids,
                generation.response_token_ids,
                images=images,
                grids=generation.image_grids,
                first=100 * number,
            )
        )
        context.add_step(generation, click, None, page)
    return samples


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
        steps.append(
            step(
                longer, random_tokens(7 + len(steps), 6), images=(shots[0], shots[index]), grids=grids[[0, index]],
                trajectory=(1, index), first=1000 * len(steps),
            )
        )  # fmt: skip
    return steps


def run(rank: int, folder: str, model: str) -> None:
    """Log-probabilities, gradients, and counts of tokens and patches, for each way of packing."""
    platform = join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.build import build_model
    from megatron_webrl.model.hf_config import load_hf_config
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes())
    (chunk,) = build_model(model, dtype="float32", platform=platform)
    fill(chunk)
    processor, cost = Processor.load(model), FlopsEstimator.from_hf_config(load_hf_config(model))
    samples, appended = make_samples(processor), appended_samples(processor)
    torch.save(
        {name: _examine(chunk, processor, cost, samples, way) for name, way in WAYS.items()}, f"{folder}/found.pt"
    )
    torch.save(
        {name: _examine(chunk, processor, cost, appended, way) for name, way in APPENDED_WAYS.items()},
        f"{folder}/appended.pt",
    )
    group = group_samples(processor)
    for dtype in ("float32", "float64"):
        (chunk,) = build_model(model, dtype=dtype, platform=platform)
        fill(chunk)
        found = {name: _examine(chunk, processor, cost, group, way) for name, way in TREE_WAYS.items()}
        torch.save(found, f"{folder}/tree-{dtype}.pt")
    torch.distributed.destroy_process_group()


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
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs
    from megatron_webrl.trainer.data.sequence_packer import SequencePacker

    options = {"data_parallel_size": 1, "max_tokens": LIMIT} | way
    model.zero_grad()
    tokens = patches = 0
    rows, marks, scores = [], [], []
    for replica in range(options["data_parallel_size"]):
        builder = SequencePacker(
            processor, device=torch.device("cpu"), data_parallel_rank=replica, flops_estimator=cost, **options
        )
        built = builder.build(samples, "per_trajectory", 10)
        rows.append(len(built))
        for batch in built:
            logits = model(batch.inputs)
            if logits.dtype is torch.float64:  # the trainer's function computes in float32
                scaled = logits[:, : model.unpadded_vocab_size] / batch.temperature
                logprobs = scaled.log_softmax(dim=1).gather(1, batch.targets[:, None])[:, 0]
            else:
                logprobs, _ = vocab_parallel_logprobs(
                    logits, batch.targets, batch.temperature, model.unpadded_vocab_size, None
                )
            (batch.weight * batch.advantage * logprobs).sum().backward()
            real = batch.weight > 0
            if real.any():
                tokens, patches = tokens + batch.token_count, patches + len(batch.inputs.pixels)
            marks.append(batch.behaviour_logprobs[real])
            scores.append(logprobs.detach()[real])
    order = torch.cat(marks).argsort()
    gradients: dict[str, Tensor] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {
        "marks": torch.cat(marks)[order],
        "logprobs": torch.cat(scores)[order],
        "gradients": gradients,
        "tokens": tokens,
        "patches": patches,
        "rows": rows,
    }
