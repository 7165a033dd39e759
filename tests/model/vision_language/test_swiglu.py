"""SwiGLU against its formula by autograd, and its compiled kernels."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn.functional import silu

from megatron_webrl.model.vision_language import swiglu as module
from megatron_webrl.model.vision_language.compilation import compilation_problem
from megatron_webrl.model.vision_language.swiglu import swiglu
from tests.model.vision_language.compiler import counted_compiler

WIDTH = 24
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # of the norm; bfloat16 has 8 bits


def formula(gate_and_up: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    activated = silu(gate) * up
    return activated if weights is None else (activated * weights.unsqueeze(-1)).to(gate.dtype)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gate and up, and the weights of a router, which are float32."""
    generator = torch.Generator().manual_seed(0)
    gate_and_up = torch.randn(*shape, 2 * WIDTH, generator=generator).to(dtype).requires_grad_()
    return gate_and_up, torch.rand(shape, generator=generator).requires_grad_() if weighted else None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(50, 1), (0,)], ids=str)  # of an MLP; of experts without tokens
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients_are_those_of_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, weighted: bool
) -> None:
    gate_and_up, weights = inputs(shape, dtype, weighted)
    leaves = [x for x in (gate_and_up, weights) if x is not None]
    found, wanted = swiglu(gate_and_up, weights), formula(gate_and_up, weights)
    assert torch.equal(found, wanted)
    gradient = torch.randn(WIDTH, *shape, generator=torch.Generator().manual_seed(1)).to(dtype).movedim(0, -1)
    mine, theirs = (torch.autograd.grad(each, leaves, gradient) for each in (found, wanted))
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


def test_weights_without_gradient_get_none() -> None:
    gate_and_up, weights = inputs((5,), torch.float32, True)
    assert weights is not None
    swiglu(gate_and_up, weights.detach()).sum().backward()
    assert gate_and_up.grad is not None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(torch.float32, False), (torch.bfloat16, False), pytest.param(torch.bfloat16, True, marks=pytest.mark.slow)],
    ids=str,
)
def test_compiled_functions_compute_the_formula(dtype: torch.dtype, compiled: bool, weighted: bool) -> None:
    """In float32 inside: for bfloat16 the reference is the formula in float32, which they are nearer to."""
    plain = () if compiled else (module.product, module.gradients)
    for shape in ((50, 1), (7,)):
        gate_and_up, weights = inputs(shape, dtype, weighted)
        wide = gate_and_up.detach().float().requires_grad_()
        scale = None if weights is None else weights.detach().clone().requires_grad_()
        with counted_compiler(module, *plain):
            found, wanted = swiglu(gate_and_up, weights, compiled=True), formula(wide, scale)
            found.backward(torch.ones_like(found))
        assert found.dtype is dtype
        assert found.shape == wanted.shape
        wanted.backward(torch.ones_like(wanted))
        pairs = [(found, wanted), (gate_and_up.grad, wide.grad)]
        if weights is not None and scale is not None:
            pairs.append((weights.grad, scale.grad))
        for one, other in pairs:
            assert one is not None
            assert other is not None
            assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


@pytest.mark.slow
def test_any_number_of_tokens_takes_the_same_compiled_code() -> None:
    with counted_compiler(module) as compiler:
        before = 0
        # The last width is that of a shared expert.
        for tokens, width in ((5, 8), (2, 8), (300, 8), (0, 8), (1, 8), (7, 12)):
            for weights in (None, torch.ones(tokens, 1)):
                gate_and_up = torch.ones(tokens, 1, 2 * width, requires_grad=True)
                swiglu(gate_and_up, weights, compiled=True).sum().backward()
                with torch.no_grad():
                    swiglu(gate_and_up, weights, compiled=True)
            before = before or compiler.frame_count
        assert compiler.frame_count == before


def test_kernels_that_compute_other_values_are_not_used() -> None:
    device, wrong = torch.device("cpu"), (module.product, lambda *given: (2 * given[1], None))
    with mock.patch.object(module, "compiled_functions", return_value=(module.product, module.gradients)):
        assert compilation_problem([module.example], device, torch.bfloat16) == ""
    with mock.patch.object(module, "compiled_functions", return_value=wrong):
        assert compilation_problem([module.example], device, torch.bfloat16) == "compiled kernels compute other values"
    with mock.patch.object(module, "compiled_functions", side_effect=RuntimeError("no C compiler")):
        assert compilation_problem([module.example], device, torch.bfloat16) == "RuntimeError: no C compiler"
