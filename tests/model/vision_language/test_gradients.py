"""Products that are added to the gradient buffers of DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch

from megatron_webrl.model.gradients import add_product
from megatron_webrl.model.vision_language import experts


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
