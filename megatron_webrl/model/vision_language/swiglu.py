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

from megatron_webrl.model.vision_language.compilation import compile_functions


class SwiGLU(MegatronModule):
    """Megatron's interface of an activation that takes gate and up as one tensor [..., 2 * width]."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., width]."""
        return swiglu(gate_and_up, compiled=self.config.compile_pointwise)


def swiglu(gate_and_up: Tensor, weights: Tensor | None = None, compiled: bool = False) -> Tensor:
    """silu(gate) * up [..., width] of one tensor [..., 2 * width]; times float32 `weights` [...], if given.

    Autograd would also keep silu(gate), the product and what is multiplied by the weights. `compiled`: one kernel for
    each pass, compiled once for any number of tokens; a plain operation reads and writes each value.
    """
    output: Tensor = _SwiGLU.apply(gate_and_up, weights, compiled)
    return output


def example(device: torch.device, dtype: torch.dtype, compiled: bool) -> tuple[Tensor, ...]:
    """Values and gradients of a few rows, without weights and with them."""
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(48, 64, dtype=dtype, device=device, generator=generator)
    found: list[Tensor] = []
    for weights in (None, torch.rand(48, device=device, generator=generator)):
        leaf = rows.clone().requires_grad_()
        output = swiglu(leaf, weights, compiled)
        output.sum().backward()
        assert leaf.grad is not None
        found += [output.detach(), leaf.grad]
    return tuple(found)


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
    return compile_functions(product, gradients, backend=backend, dynamic=True)


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
