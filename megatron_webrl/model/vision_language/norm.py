"""Root-mean-square norm, which keeps its input alone for the backward pass; on CUDA compiled, if that is possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_webrl.model.vision_language.compilation import compile_functions
from megatron_webrl.model.vision_language.text_config import TextConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 and scaled in the input's dtype.

    With `layernorm_zero_centered_gamma` it is scaled by one plus the weight, in float32.
    `weight.sequence_parallel` makes Megatron sum the gradient over tensor-parallel ranks, which see different tokens.
    """

    def __init__(self, config: TextConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.compiled = config.compile_pointwise
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`; same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered, self.compiled)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False, compiled: bool = False) -> Tensor:
    """The norm of `x` [..., width] by `weight` [width]; `zero_centered`: by one plus the weight.

    Autograd would also keep what the weight scales. `compiled`: one kernel for each pass, compiled once for any number
    of rows; plain operations read and write each value several times.
    """
    output: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered, compiled)
    return output


def example(device: torch.device, dtype: torch.dtype, compiled: bool) -> tuple[Tensor, ...]:
    """Values and gradients of a few rows, with both kinds of weight."""
    generator = torch.Generator(device).manual_seed(0)
    rows, weight = (torch.randn(*shape, device=device, generator=generator) for shape in ((48, 64), (64,)))
    found: list[Tensor] = []
    for zero_centered in (False, True):
        x, scale = (each.to(dtype).requires_grad_() for each in (rows, weight))
        output = rms_norm(x, scale, 1e-6, zero_centered, compiled)
        (output * output.detach()).sum().backward()
        assert x.grad is not None
        assert scale.grad is not None
        found += [output.detach(), x.grad, scale.grad]
    return tuple(found)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool, compiled: bool) -> Tensor:
        rows = x.detach().flatten(0, -2).contiguous()  # keys are a view of the whole projection: kept, they keep that
        ctx.save_for_backward(rows, weight)
        compiled = compiled and len(rows) > 1  # it would compile again for 0 and for 1
        ctx.settings = eps, zero_centered, compiled
        norm = compiled_functions()[0] if compiled else normalized
        result: Tensor = norm(rows, weight.detach(), eps, zero_centered)
        return result.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weight = ctx.saved_tensors
        eps, zero_centered, compiled = ctx.settings
        of_both = compiled_functions()[1] if compiled else gradients
        of_x, of_weight = of_both(gradient.reshape(rows.shape).contiguous(), rows, weight.detach(), eps, zero_centered)
        return of_x.view_as(gradient), of_weight, None, None, None


@cache
def compiled_functions(backend: Any = "inductor") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`normalized` and `gradients`, compiled when they are first called, for any number of rows."""
    return compile_functions(normalized, gradients, backend=backend, dynamic=True)


def normalized(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """The norm of rows [T, width]."""
    unit, _ = _unit(x, eps)
    if zero_centered:
        return (unit * (1.0 + weight.to(unit.dtype))).to(x.dtype)
    return weight * unit.to(x.dtype)


def gradients(gradient: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Gradients of rows [T, width] and of the weight [width], computed in float32."""
    unit, inverse = _unit(x, eps)
    wide, scale = gradient.to(unit.dtype), weight.to(unit.dtype)
    scaled = wide * (1.0 + scale if zero_centered else scale)
    of_x = inverse * (scaled - unit * (scaled * unit).mean(dim=-1, keepdim=True))
    return of_x.to(x.dtype), (wide * unit).sum(dim=0).to(weight.dtype)


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows of a mean square of 1, float32 or wider, and what each was multiplied by."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide * inverse, inverse
