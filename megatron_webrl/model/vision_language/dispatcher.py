"""Tokens to their experts and back, sorted on the device.

Megatron's dispatcher selects tokens by a mask, whose number of true elements the host must read, and reads the tokens
of each expert too. Here each token takes the same number of experts, so that the host knows how many rows there are.
It reads counts only where ranks exchange tokens, whose collectives need sizes: once per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher without masked selections; without reads by the host where a rank has all experts."""

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange tokens, because each has some of the experts, or a shard of them."""
        return self.ep_size > 1 or self.tp_size > 1

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T * top-k, hidden] in the order of experts, then of tokens, and their routing weights [T * top-k].

        `hidden_states` [..., hidden], of T tokens; bool `routing_map` and `probs` [T, experts], top-k true in each row.
        """
        self.hidden_shape, self.probs = hidden_states.shape, probs
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.preprocess(routing_map))
        # [T, top-k]; a mask has no order, and numbers in the order of experts repeat the same sums in each pass
        top_k = self.config.moe_router_topk
        experts = routing_map.byte().topk(top_k).indices.sort().values
        self._order = experts.flatten().argsort(stable=True)
        self._places = torch.empty_like(self._order)
        self._places.scatter_(0, self._order, torch.arange(self._order.numel(), device=self._order.device))
        rows = _Copies.apply(hidden_states.reshape(-1, self.hidden_shape[-1]), self._order, self._places, top_k)
        return rows, probs.gather(1, experts).flatten().index_select(0, self._order)

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens per local expert and routing weights, in the order of the local experts.

        The tokens per expert are on the device if this rank has all experts, else on the host.
        """
        if self.exchanges:
            return super().dispatch_postprocess(rows, probs)
        return rows, self.tokens_per_expert, probs

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Rows in the order in which they were received."""
        return super().combine_preprocess(rows) if self.exchanges else rows

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """The sum over each token's experts, shaped as the tokens that were given."""
        total: Tensor = _Sums.apply(rows, self._order, self._places, self.config.moe_router_topk)
        return total.view(self.hidden_shape)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert) if self.exchanges else tokens_per_expert


class _Copies(torch.autograd.Function):
    """Rows [T * top_k, hidden] of tokens [T, hidden]: copy i of all, counted token by token, is row `places[i]`.

    The gradient adds the copies of each token at once; that of an index selection adds row by row, in any order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.top_k = top_k
        return tokens.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _sums(gradients[0], ctx.saved_tensors[0], ctx.top_k), None, None, None


class _Sums(torch.autograd.Function):
    """Tokens [T, hidden], each the sum of its rows of [T * top_k, hidden]; the reverse of `_Copies`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _sums(rows, places, top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0] // ctx.top_k), None, None, None


def _sums(rows: Tensor, places: Tensor, top_k: int) -> Tensor:
    return rows.index_select(0, places).view(-1, top_k, rows.shape[1]).sum(1)
