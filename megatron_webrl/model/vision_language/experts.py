"""Mixture of experts: router, replay of recorded routes, dispatcher, grouped experts.

Tokens to their experts and back, sorted on the device.

Megatron's dispatcher selects tokens by a mask, whose number of true elements the host must read, and reads the tokens
of each expert too. Here each token takes the same number of experts, so that the host knows how many rows there are.
It reads counts only where ranks exchange tokens, whose collectives need sizes: once per layer.

Routing replay: tokens go to the experts that the engine chose, weighted by the model's own router.

Rounding differs between engine and trainer, so that a router's choice may differ where two logits are close: the token
then passes through another expert. Replayed choices remove this difference (R3, arXiv 2510.11370). The weights of the
experts are the softmax over the logits of the chosen ones, as without replay, so gradients reach the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn, where
from torch.nn.functional import grouped_mm

from megatron_webrl.model.compute_options import ExpertKernel
from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED
from megatron_webrl.model.vision_language.swiglu import swiglu


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


ALIGNMENT = 16  # bytes; PyTorch's kernel loads rows of a multiple of that


class Experts(SequentialMLP):
    """Megatron's experts with its parameters, one MLP each; the products of all experts are computed together.

    Megatron computes one expert after the other: many small products, between which a GPU idles.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts: nn.ModuleList = _LastFirst(list(self.local_experts))

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, hidden] from tokens [T, hidden] in the order of experts, int [experts] and routing weights [T].

        With `tokens_per_expert` on the device, only experts one after the other make the host wait for it.
        """
        experts: list[Any] = list(self.local_experts)
        first: list[Tensor] = [expert.linear_fc1.weight for expert in experts]
        if not computes_together(self.config.expert_kernel, first[0]):
            output, _ = super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
            return output, None
        device = first[0].device
        counts = tokens_per_expert if tokens_per_expert.is_cuda else copy_to_device(tokens_per_expert, device)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate_and_up = grouped_linear(permuted_local_hidden_states, ends, first)
        activated = swiglu(gate_and_up, permuted_probs, self.config.compile_pointwise)
        return grouped_linear(activated, ends, [expert.linear_fc2.weight for expert in experts]), None


class _LastFirst(nn.ModuleList):
    """Modules that are registered from the last to the first, and iterated as given.

    Megatron lays the parameters of its buffers in memory in reverse order. So the weights of experts 0, 1, ... lie one
    after the other, and `_stacked` need not copy them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for index in reversed(range(len(modules))):
            self.add_module(str(index), modules[index])

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(len(self)))


def computes_together(kernel: ExpertKernel, weight: Tensor) -> bool:
    """Whether experts with such weights [out, in] are computed together; auto: where PyTorch has a kernel for them."""
    if kernel == "sequential":
        return False
    aligned = all(size * weight.element_size() % ALIGNMENT == 0 for size in weight.shape)
    return aligned and weight.dtype in ((torch.bfloat16,) if weight.is_cuda else (torch.float32, torch.bfloat16))


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[T, out]: tokens [T, in] of group g times weights[g] [out, in]; int32 [groups] `ends`: first token after g."""
    output: Tensor = _GroupedLinear.apply(tokens, ends, *weights)
    return output


class _GroupedLinear(torch.autograd.Function):
    """Keeps the weights themselves for the backward pass, not the tensor that holds all of them.

    With buffers of DistributedDataParallel, their gradients are added there, in one operation for all experts.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        ctx.totals = [getattr(weight, "main_grad", None) for weight in weights]
        if not len(tokens):
            return tokens.new_empty(0, weights[0].shape[0])
        return grouped_mm(tokens, _stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_tokens = of_weights = None
        if not len(tokens):
            added = ctx.totals[0] is not None
            return torch.empty_like(tokens), None, *(None if added else torch.zeros_like(each) for each in weights)
        if ctx.needs_input_grad[0]:
            of_tokens = grouped_mm(gradient, _stacked(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            of_weights = grouped_mm(gradient.t(), tokens, offs=ends)
            if ctx.totals[0] is not None:
                _add(ctx.totals, of_weights)
                of_weights = None
        return of_tokens, None, *((None,) * len(weights) if of_weights is None else of_weights.unbind())


def _add(totals: Sequence[Tensor], gradients: Tensor) -> None:
    """Add gradients [groups, out, in] to one tensor of each group."""
    whole = _stacked(totals)
    if whole.data_ptr() == totals[0].data_ptr():
        whole.add_(gradients)
        return
    for total, gradient in zip(totals, gradients.unbind(), strict=True):
        total.add_(gradient)


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """[groups, out, in]: a view where the weights lie at equal distances in one storage, else a copy."""
    first, storages = weights[0], {weight.untyped_storage().data_ptr() for weight in weights}
    starts = [weight.storage_offset() for weight in weights]
    step = starts[1] - starts[0] if len(starts) > 1 else first.numel()
    regular = step > 0 and starts == list(range(starts[0], starts[0] + step * len(starts), step))
    if regular and len(storages) == 1:
        return first.as_strided((len(weights), *first.shape), (step, *first.stride()))
    return torch.stack(list(weights))
