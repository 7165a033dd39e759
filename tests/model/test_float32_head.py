"""Float32 logits of a bfloat16 model, and their gradients, equal those of float64 products of the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model import tiny
from tests.trainer.ranks import process_groups, results

MODELS = {"untied": tiny.Shape(), "tied": tiny.Shape(tie=True)}
LAYOUTS = {
    1: [({}, True)],
    2: [({"tensor": 2}, True), ({"tensor": 2}, False), ({"pipeline": 2}, True)],
}
"""By number of ranks: sizes, and whether sequences are split over tensor-parallel ranks."""
SCALE = 16.0  # of the logits: rounding those to bfloat16 changes probabilities by some per cent


def run(platform: Any, _: Path, folder: Path, ranks: int) -> dict[tuple[int, str], dict[str, Any] | None]:
    from megatron_webrl.model.layout import ParallelSizes

    found = {}
    for number, (sizes, sequence_parallel) in enumerate(LAYOUTS[ranks]):
        with process_groups(ParallelSizes(**sizes)):
            for model in MODELS:
                found[number, model] = examine(folder / model, platform, sequence_parallel)
    return found


def examine(folder: Path, platform: Any, sequence_parallel: bool) -> dict[str, Any] | None:
    """What goes into the output layer and comes out of it, whole, with gradients; None on an earlier stage."""
    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs
    from megatron_webrl.trainer.optimizer import wrap_ddp

    options = ComputeOptions(sequence_parallel=sequence_parallel, float32_head=True)
    [model] = build_model(folder, dtype="bfloat16", platform=platform, options=options)
    load_hf([model], folder)
    group, inputs, gradients, outputs = model.pg_collection.tp, list[Tensor](), list[Tensor](), list[Tensor]()

    def whole(part: Tensor, dim: int) -> Tensor:
        shards = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(shards, part.detach().contiguous(), group=group)
        return torch.cat(shards, dim=dim)

    def keep(_: Any, __: Any, hidden: Tensor) -> None:
        inputs.append(hidden)
        hidden.register_hook(gradients.append)

    if model.post_process:
        model.decoder.final_layernorm.weight.data.mul_(SCALE)
        model.decoder.register_forward_hook(keep)
    [wrapped] = wrap_ddp([model])
    wrapped.train()
    rows = [tiny.pack([sample]) for sample in tiny.samples().values()]

    def loss_of(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        targets = rows[index][1]
        logprobs, _ = vocab_parallel_logprobs(logits, targets, tiny.TEMPERATURE, tiny.VOCABULARY, group)
        outputs.append(whole(logits, 1)[:, : tiny.VOCABULARY])
        return (logprobs * tiny.token_weights(len(targets))).sum() * len(rows), {}

    schedule.forward_backward([wrapped], [row for row, _ in rows], loss_of, forward_only=False)
    if not model.post_process:
        return None
    hidden = [whole(each, 0) if sequence_parallel else each.detach() for each in inputs]
    found = {
        "logits": outputs,
        "hidden": [each[:, 0][row.scored_positions] for each, (row, _) in zip(hidden, rows, strict=True)],
        "gradients": [
            (whole(each, 0) if sequence_parallel else each)[:, 0][row.scored_positions]
            for each, (row, _) in zip(gradients, rows, strict=True)
        ],
    }
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    found["weight"] = whole(weight, 0)[: tiny.VOCABULARY]
    if not tied:
        found["gradient of weight"] = whole(weight.main_grad, 0)[: tiny.VOCABULARY]
    return found


def check(found: dict[str, Any]) -> None:
    weight = found["weight"].double().requires_grad_()
    for sample, logits, inputs, gradient in zip(
        tiny.samples().values(), found["logits"], found["hidden"], found["gradients"], strict=True
    ):
        hidden = inputs.double().requires_grad_()
        exact = hidden @ weight.t()
        assert exact.std() > SCALE / 4
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=0)
        targets = sample.tokens[sample.prompt :, None]
        logprobs = (exact / tiny.TEMPERATURE).log_softmax(dim=-1).gather(1, targets)[:, 0]
        (logprobs * tiny.token_weights(len(targets))).sum().backward()
        assert relative_error(gradient, hidden.grad) < 4e-3  # that of rounding it to bfloat16 is 2e-3
    if "gradient of weight" in found:
        assert relative_error(found["gradient of weight"], weight.grad) < 4e-3


def relative_error(found: Tensor, expected: Tensor | None) -> float:
    assert expected is not None
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_logits_and_gradients_are_those_of_the_same_numbers_in_float64(tmp_path: Path, ranks: int) -> None:
    for seed, (name, shape) in enumerate(MODELS.items()):
        tiny.write_model(tmp_path / name, shape, seed)
    everyone = results(run, tmp_path, tmp_path, ranks, ranks=ranks)
    for case in everyone[0]:
        parts = [found[case] for found in everyone if found[case] is not None]
        assert parts
        for found in parts:
            check(found)
