"""RMSNorm with Megatron's constructor."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 and scaled in the input's dtype.

    With `layernorm_zero_centered_gamma` it is scaled by one plus the weight, in float32.
    `weight.sequence_parallel` makes Megatron sum the gradient over tensor-parallel ranks, which see different tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`; same shape and dtype. On CUDA PyTorch's norm is one kernel for each pass."""
        shape = x.shape[-1:]
        if self.zero_centered:
            return rms_norm(x.float(), shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return self.weight * rms_norm(x, shape, None, self.eps)
