"""Experts that are computed together: products of groups, and which weights are copied for them."""

from __future__ import annotations

import pytest
import torch

from megatron_webrl.model.vision_language import experts

IN, OUT = 16, 24


def weights(count: int, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    """Weights [OUT, IN] in one storage, `step` elements apart."""
    buffer = torch.randn(count * abs(step), dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = [buffer[start : start + OUT * IN].view(OUT, IN) for start in range(0, count * abs(step), abs(step))]
    return [each.requires_grad_() for each in (found if step > 0 else reversed(found))]


@pytest.mark.parametrize("counts", [[4, 1, 8], [0, 5, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("step", [OUT * IN + 64, -OUT * IN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_product_equals_the_products_of_its_groups(counts: list[int], step: int, dtype: torch.dtype) -> None:
    given = weights(len(counts), dtype, step)
    tokens = torch.randn(sum(counts), IN, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = experts.grouped_linear(tokens, torch.tensor(counts).cumsum(0, dtype=torch.int32), given)
    wanted = torch.cat([part @ weight.t() for part, weight in zip(tokens.split(counts), given, strict=True)])
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn(wanted.shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    pairs = (torch.autograd.grad(each, [tokens, *given], gradient) for each in (found, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_only_weights_at_equal_distances_in_one_storage_are_not_copied() -> None:
    beside = weights(4, torch.float32, OUT * IN + 64)
    for given, copied in (
        (beside, False), (beside[:1], False), (beside[::2], False), (beside[::-1], True),
        ([*beside[:2], beside[3]], True), ([beside[0], beside[1].detach().clone()], True),
    ):  # fmt: skip
        detached = [each.detach() for each in given]
        found = experts._stacked(detached)
        assert torch.equal(found, torch.stack(detached))
        assert (found.data_ptr() != detached[0].data_ptr()) is copied


def test_experts_are_computed_together_where_a_kernel_exists() -> None:
    for width, dtype, together in (
        (16, torch.float32, True), (16, torch.bfloat16, True), (16, torch.float64, False),
        (20, torch.bfloat16, False),  # rows of 40 bytes
    ):  # fmt: skip
        assert experts.computes_together("auto", torch.empty((24, width), dtype=dtype)) is together, (width, dtype)
