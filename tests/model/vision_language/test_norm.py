"""RMSNorm against its formula by autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_webrl.model.vision_language.layers import RMSNorm

WIDTH, EPSILON = 48, 1e-2


def formula(x: torch.Tensor, weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    wide = x.float()
    unit = wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return (unit * (1 + weight.float())).to(x.dtype) if zero_centered else weight * unit.to(x.dtype)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-9)], ids=str)
def test_values_and_gradients_are_those_of_the_formula(
    dtype: torch.dtype, tolerance: float, zero_centered: bool
) -> None:
    """In bfloat16 it rounds where the formula does: not more than one value in a few differs by its last bit."""
    config: Any = SimpleNamespace(
        use_cpu_initialization=True, layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype,
        sequence_parallel=False,
    )  # fmt: skip
    norm, generator = RMSNorm(config, WIDTH, EPSILON), torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(WIDTH, generator=generator))
    x, gradient = (torch.randn(20, 1, 4, WIDTH, generator=generator).to(dtype) for _ in range(2))
    inputs = [x.requires_grad_(), norm.weight]
    found, wanted = norm(x), formula(x, norm.weight, zero_centered)
    pairs = [(found, wanted)]
    pairs += zip(*(torch.autograd.grad(each, inputs, gradient) for each in (found, wanted)), strict=True)
    for one, other in pairs:
        assert one.dtype is other.dtype
        assert (one - other).norm() <= tolerance * other.norm()
