"""Routing replay: tokens go to the experts that the engine chose, weighted by the model's own router.

Rounding differs between engine and trainer, so that a router's choice may differ where two logits are close: the token
then passes through another expert. Replayed choices remove this difference (R3, arXiv 2510.11370). The weights of the
experts are the softmax over the logits of the chosen ones, as without replay, so gradients reach the router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, where

from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED


class ReplayRouter(TopKRouter):
    """Megatron's router, with given experts for the tokens of a pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay: _GivenExperts = _GivenExperts()


class _GivenExperts:
    """In the place of Megatron's RouterReplay, which holds the experts of all layers in a class variable."""

    experts: Tensor | None = None  # int16 [T, top_k], set before each pass and recomputation; None: the router chooses

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [T, top_k] of the experts of each token. Called by Megatron with scores [T, experts]."""
        if self.experts is None:
            return compute_topk(scores, topk, num_groups, group_topk)
        _, own = compute_topk(scores.detach(), topk, num_groups, group_topk)
        given = self.experts.to(own.dtype)
        chosen = where(given == NOT_RECORDED, own, given)
        return scores.gather(1, chosen), chosen
