"""The norm against its formula by autograd, what it keeps, and its compiled kernels."""

from __future__ import annotations

import pytest
import torch

from megatron_webrl.model.vision_language import norm as module
from megatron_webrl.model.vision_language.norm import rms_norm
from tests.model.vision_language.compiler import counted_compiler

WIDTH, EPS = 24, 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # of the norm; bfloat16 has 8 bits


def formula(x: torch.Tensor, weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """As Qwen3VLTextRMSNorm and Qwen3_5RMSNorm of transformers compute it."""
    unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return (unit * (1.0 + weight.float())).to(x.dtype) if zero_centered else weight * unit.to(x.dtype)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, WIDTH, generator=generator).to(dtype) for size in (shape, ()))
    return x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(50, 1), (6, 1, 4), (0, 1)], ids=str)  # of tokens; of their heads; of no token
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_are_those_of_the_formula_and_gradients_those_of_float32(
    shape: tuple[int, ...], dtype: torch.dtype, zero_centered: bool
) -> None:
    x, weight = inputs(shape, dtype)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = rms_norm(x, weight, EPS, zero_centered)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), weight.data_ptr()]  # nothing of its own
    assert torch.equal(found, formula(x, weight, zero_centered))
    wide = [leaf.detach().float().requires_grad_() for leaf in (x, weight)]
    gradient = torch.randn(WIDTH, *shape, generator=torch.Generator().manual_seed(1)).to(dtype).movedim(0, -1)
    mine = torch.autograd.grad(found, (x, weight), gradient)
    theirs = torch.autograd.grad(formula(*wide, zero_centered), wide, gradient.float())
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype is dtype
        assert one.shape == other.shape
        assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(torch.float32, False), (torch.bfloat16, False), pytest.param(torch.bfloat16, True, marks=pytest.mark.slow)],
    ids=str,
)
def test_compiled_functions_compute_the_formula(dtype: torch.dtype, compiled: bool) -> None:
    plain = () if compiled else (module.normalized, module.gradients)
    for zero_centered in (False, True):
        x, weight = inputs((50, 1), dtype)
        wide = [leaf.detach().float().requires_grad_() for leaf in (x, weight)]
        with counted_compiler(module, *plain):
            found, wanted = rms_norm(x, weight, EPS, zero_centered, compiled=True), formula(*wide, zero_centered)
            found.backward(torch.ones_like(found))
        wanted.backward(torch.ones_like(wanted))
        for one, other in ((found, wanted), (x.grad, wide[0].grad), (weight.grad, wide[1].grad)):
            assert one is not None
            assert other is not None
            assert one.dtype is dtype
            assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


@pytest.mark.slow
def test_any_number_of_rows_takes_the_same_compiled_code() -> None:
    with counted_compiler(module) as compiler:
        before = 0
        for tokens in (5, 2, 300, 0, 1, 7):
            x, weight = torch.ones(tokens, 1, WIDTH, requires_grad=True), torch.ones(WIDTH, requires_grad=True)
            rms_norm(x, weight, EPS, compiled=True).sum().backward()
            with torch.no_grad():
                rms_norm(x, weight, EPS, compiled=True)
            before = before or compiler.frame_count
        assert compiler.frame_count == before
