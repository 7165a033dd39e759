"""SwiGLU, silu(gate) * up, which keeps its input alone for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


class SwiGLU(MegatronModule):
    """Megatron's interface of an activation that takes gate and up as one tensor [..., 2 * width]."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., width]."""
        return swiglu(gate_and_up)


def swiglu(gate_and_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up [..., width] of one tensor [..., 2 * width]; times float32 `weights` [...], if given.

    Autograd would also keep silu(gate), the product and what is multiplied by the weights.
    """
    output: Tensor = _SwiGLU.apply(gate_and_up, weights)
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_and_up, weights)
        gate, up = gate_and_up.chunk(2, dim=-1)
        output = silu(gate).mul_(up)
        return output if weights is None else output.mul_(weights.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_and_up, weights = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        activated, of_weights = silu(gate), None
        if weights is not None:
            if ctx.needs_input_grad[1]:
                of_weights = (activated * up).to(weights.dtype).mul_(gradient).sum(dim=-1)
            gradient = (gradient * weights.unsqueeze(-1)).to(gate.dtype)
        result = torch.empty_like(gate_and_up)  # both halves are written in place: no copy joins them
        of_gate, of_up = result.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result, of_weights
