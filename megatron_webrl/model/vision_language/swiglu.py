"""SwiGLU, silu(gate) * up, which keeps its input alone for the backward pass; on CUDA compiled, if that is possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from megatron_webrl.system.text import first_line

COMPILED_ERROR = 2**-6  # of the norm: two roundings to bfloat16, which has 8 bits


class SwiGLU(MegatronModule):
    """Megatron's interface of an activation that takes gate and up as one tensor [..., 2 * width]."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., width]."""
        return swiglu(gate_and_up, compiled=self.config.compile_swiglu)


def swiglu(gate_and_up: Tensor, weights: Tensor | None = None, compiled: bool = False) -> Tensor:
    """silu(gate) * up [..., width] of one tensor [..., 2 * width]; times float32 `weights` [...], if given.

    Autograd would also keep silu(gate), the product and what is multiplied by the weights. `compiled`: one kernel for
    each pass, compiled once for any number of tokens; a plain operation reads and writes each value.
    """
    output: Tensor = _SwiGLU.apply(gate_and_up, weights, compiled)
    return output


def compilation_problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why the compiled kernels cannot be used on this CUDA device; empty if they compute what plain operations do."""
    import torch._dynamo.config as dynamo

    if dynamo.disable:
        return "torch.compile is disabled"
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(48, 64, dtype=dtype, device=device, generator=generator)
    weights = torch.rand(48, device=device, generator=generator)
    try:
        for scale in (None, weights):
            plain, compiled = (_values_and_gradient(rows, scale, each) for each in (False, True))
            for found, wanted in zip(compiled, plain, strict=True):
                if not (found - wanted).norm() <= COMPILED_ERROR * wanted.norm():
                    return "compiled kernels compute other values"
    except Exception as error:  # any: it needs Triton, a C compiler and a folder to write to
        return f"{type(error).__name__}: {first_line(error)[:200]}"
    return ""


def _values_and_gradient(rows: Tensor, weights: Tensor | None, compiled: bool) -> tuple[Tensor, Tensor]:
    leaf = rows.clone().requires_grad_()
    output = swiglu(leaf, weights, compiled)
    output.sum().backward()
    assert leaf.grad is not None
    return output.detach().float(), leaf.grad.float()


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, weights: Tensor | None, compiled: bool) -> Tensor:
        ctx.save_for_backward(gate_and_up, weights)
        ctx.compiled = compiled = compiled and gate_and_up[..., 0].numel() > 1  # it would compile again for 0 and for 1
        if compiled:
            product, _ = compiled_functions()
            rows = product(*_as_rows(gate_and_up, weights))
            return rows.view(*gate_and_up.shape[:-1], rows.shape[-1])
        gate, up = gate_and_up.chunk(2, dim=-1)
        output = silu(gate).mul_(up)
        return output if weights is None else output.mul_(weights.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_and_up, weights = ctx.saved_tensors
        if ctx.compiled:
            _, of_inputs = compiled_functions()
            rows, scale = _as_rows(gate_and_up, weights)
            result, of_weights = of_inputs(gradient.reshape(len(rows), -1).contiguous(), rows, scale)
            return result.view_as(gate_and_up), None if of_weights is None else of_weights.view_as(weights), None
        gate, up = gate_and_up.chunk(2, dim=-1)
        activated, of_weights = silu(gate), None
        if weights is not None:
            if ctx.needs_input_grad[1]:
                of_weights = (activated * up).mul_(gradient).sum(dim=-1, dtype=weights.dtype)
            gradient = torch.mul(gradient, weights.unsqueeze(-1), out=torch.empty_like(activated))
        result = torch.empty_like(gate_and_up)  # both halves are written in place: no copy joins them
        of_gate, of_up = result.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result, of_weights, None


def _as_rows(gate_and_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Without their history, and with one shape for MLPs and experts: compiled code depends on both."""
    return gate_and_up.detach().flatten(0, -2), None if weights is None else weights.detach().flatten()


@cache
def compiled_functions(backend: Any = "inductor") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`product` and `gradients`, compiled when they are first called, for any number of tokens."""
    import torch._inductor.config as inductor  # takes seconds, and only CUDA needs it

    inductor.compile_threads = 1  # else it starts a pool of processes, for two functions
    return tuple(  # type: ignore[return-value]
        torch.compile(function, dynamic=True, backend=backend) for function in (product, gradients)
    )


def product(gate_and_up: Tensor, weights: Tensor | None) -> Tensor:
    """SwiGLU of rows [T, 2 * width], computed in float32."""
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    result = silu(gate) * up
    if weights is not None:
        result = result * weights[:, None]
    return result.to(gate_and_up.dtype)


def gradients(gradient: Tensor, gate_and_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of rows [T, 2 * width] and of weights [T], computed in float32."""
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    wide, sigmoid, of_weights = gradient.float(), gate.sigmoid(), None
    if weights is not None:
        of_weights = (wide * gate * sigmoid * up).sum(dim=-1)
        wide = wide * weights[:, None]
    of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([of_gate, wide * gate * sigmoid], dim=-1).to(gate_and_up.dtype), of_weights
