"""The value head of a step critic: a linear function of the hidden state at the end of a step's prompt."""

from __future__ import annotations

import torch
from torch import Tensor

VALUE_HEAD = "value_head"
"""Name of the head in the last model chunk. It belongs to the trainer: no engine and no Hugging Face folder has it."""


class ValueHead(torch.nn.Module):
    """V = w h, with w = 0 before training. Replicated over tensor-parallel ranks, which all have the same inputs."""

    def __init__(self, hidden_size: int, trains_trunk: bool) -> None:
        """`trains_trunk`: whether gradients of values reach the hidden states."""
        super().__init__()
        self.trains_trunk = trains_trunk
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values, float32 [n], of hidden states [n, 1, hidden size]."""
        hidden = hidden if self.trains_trunk else hidden.detach()
        return (hidden.float() @ self.weight[0]).squeeze(1)
