"""Gradients that products add to the buffers of DistributedDataParallel equal those of autograd alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.model.gradients import add_product
from megatron_webrl.model.vision_language import experts
from tests import gloo
from tests.model import tiny

TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7}  # of the norm; autograd adds two micro-batches in bfloat16


# -- the process --------------------------------------------------------------------------------------------------

SHAPES = {
    "tied": tiny.Shape(tie=True, layers=2),
    "untied": tiny.Shape(layers=2),
    "experts": tiny.Shape(layers=2, experts=4, dense_layers=(1,)),
}
CASES = [
    ("tied", "float32", "none", "auto"),
    ("untied", "bfloat16", "full", "auto"),
    ("experts", "float32", "selective", "auto"),
    ("experts", "bfloat16", "none", "auto"),
    ("experts", "float32", "none", "sequential"),
]
"""Shape, dtype, recomputation, and how experts are computed."""


def run(rank: int, folder: str) -> None:
    """Write the gradients of each case, by autograd alone and in buffers, to found.pt."""
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes())
    found = [[_gradients(Path(folder), case, platform, wrapped) for wrapped in (False, True)] for case in CASES]
    torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def _gradients(folder: Path, case: Any, platform: Any, wrapped: bool) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss of two micro-batches, of which the last has no image."""
    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.trainer.optimizer import wrap_ddp

    shape, dtype, recompute, experts = case
    options = ComputeOptions(recompute=recompute, experts=experts)
    [model] = build_model(folder / shape, dtype=dtype, platform=platform, options=options)
    load_hf([model], folder / shape)
    chunks: list[Any] = wrap_ddp([model]) if wrapped else [model.train()]
    samples = tiny.samples()
    packed = [tiny.pack([samples[name] for name in names]) for names in (("image", "images"), ("text",))]

    def loss(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        targets = packed[index][1]
        row = logits.float().log_softmax(dim=1)[torch.arange(len(targets)), targets]
        return (row * tiny.token_weights(len(targets))).sum(), {}

    if wrapped:
        chunks[0].zero_grad_buffer()
    schedule.forward_backward(chunks, [replace(row) for row, _ in packed], loss, forward_only=False)
    return {name: p.main_grad if wrapped else p.grad for name, p in model.named_parameters()}


def test_gradients_in_buffers_are_those_of_autograd(tmp_path: Path) -> None:
    """Of every parameter: with a head tied to the embedding, and a vision tower that one micro-batch does not use."""
    for name, shape in SHAPES.items():
        tiny.write_model(tmp_path / name, shape, 3)
    gloo.spawn(run, str(tmp_path), ranks=1)
    for case, (plain, buffered) in zip(CASES, torch.load(tmp_path / "found.pt"), strict=True):
        assert list(plain) == list(buffered)
        for name, wanted in plain.items():
            total = buffered[name]
            assert total.dtype is torch.float32
            assert wanted.norm() > 0
            assert (total - wanted).norm() <= TOLERANCE[case[1]] * wanted.norm(), (case, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_adds_to_the_total(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, gradient = (torch.randn(50, width, generator=generator).to(dtype) for width in (16, 24))
    total = torch.randn(24, 16, generator=generator)
    expected = total + (gradient.t() @ inputs).float()
    add_product(inputs, gradient, total)
    torch.testing.assert_close(total, expected)
    add_product(inputs[:0], gradient[:0], total)  # an expert without tokens
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("regular", [True, False])
def test_gradients_of_experts_are_added_wherever_their_totals_lie(count: int, regular: bool) -> None:
    buffer = torch.randn(10, 24, 16, generator=torch.Generator().manual_seed(0))
    totals = list(buffer[2 : 2 + 2 * count : 2]) if regular else [each.clone() for each in buffer[:count]]
    gradients = torch.ones(count, 24, 16, dtype=torch.bfloat16)
    before, expected = buffer.clone(), [total + 1 for total in totals]
    experts._add(totals, gradients)
    for total, wanted in zip(totals, expected, strict=True):
        assert torch.equal(total, wanted)
    untouched = [index for index in range(10) if not (regular and index in range(2, 2 + 2 * count, 2))]
    assert torch.equal(buffer[untouched], before[untouched])
