"""Gradients that products add to the buffers of DistributedDataParallel equal those of autograd alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.model.gradients import add_product
from megatron_webrl.model.vision_language import experts
from tests.gloo import spawn
from tests.model import tiny
from tests.model.vision_language import gradient_ranks

TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7}  # of the norm; autograd adds two micro-batches in bfloat16


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, torch.Tensor]]]:
    """Gradients by case, of autograd alone and in buffers."""
    folder: Path = tmp_path_factory.mktemp("gradients")
    for name, shape in gradient_ranks.SHAPES.items():
        tiny.write_model(folder / name, shape, 3)
    spawn(gradient_ranks.run, str(folder), ranks=1)
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("case", gradient_ranks.CASES, ids=", ".join)
def test_gradients_in_buffers_are_those_of_autograd(
    found: dict[Any, list[dict[str, torch.Tensor]]], case: tuple[str, str, str, str]
) -> None:
    """Of every parameter: with a head tied to the embedding, and a vision tower that one micro-batch does not use."""
    plain, buffered = found[case]
    assert list(plain) == list(buffered)
    for name, wanted in plain.items():
        total = buffered[name]
        assert total.dtype is torch.float32
        assert wanted.norm() > 0
        assert (total - wanted).norm() <= TOLERANCE[case[1]] * wanted.norm(), name


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
