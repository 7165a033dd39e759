"""The experts of a layer, as one grouped product for each of their linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from megatron_webrl.model.compute_options import ExpertKernel
from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.vision_language.swiglu import swiglu

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
        activated = swiglu(gate_and_up, permuted_probs, self.config.compile_swiglu)
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
