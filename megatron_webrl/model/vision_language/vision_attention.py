"""Attention of the vision tower: one call for neighbouring images of equal size, and a compiled rotary embedding.

transformers calls attention for each image, and its rotary embedding takes a dozen operations on float32 copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from megatron_webrl.model.vision_language.compilation import compile_functions

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values [patches, heads, head dim]."""


def replace_attention(tower: Any, compiled: bool) -> None:
    """Let the blocks of a vision tower of transformers compute their attention here."""
    for block in tower.blocks:
        block.attn.forward = partial(attend, block.attn, compiled=compiled)


def attend(
    layer: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor],
    compiled: bool = False, **unused: Any,
) -> Tensor:  # fmt: skip
    """[patches, hidden], of which the patches of an image attend to each other.

    `cu_seqlens`: int [images + 1] on the host. `position_embeddings`: cosines and sines [patches, head dim].
    """
    qkv = layer.qkv(hidden_states).unflatten(1, (3, layer.num_heads, -1))
    runs = [(size, len(list(run))) for size, run in groupby(cu_seqlens.diff().tolist())]
    rows = []
    for (size, _), heads in zip(runs, _split(rotate(qkv, *position_embeddings, compiled), runs), strict=True):
        query, key, value = (_images(x, size) for x in heads)
        output = scaled_dot_product_attention(query, key, value, scale=layer.scaling)
        rows.append(output.transpose(1, 2).flatten(0, 1))
    projected: Tensor = layer.proj((rows[0] if len(rows) == 1 else torch.cat(rows)).flatten(1))
    return projected


def _images(heads: Tensor, size: int) -> Tensor:
    """[images, heads, patches, head dim] of images of `size` patches."""
    return heads.unflatten(0, (-1, size)).transpose(1, 2)


def _split(heads: Heads, runs: list[tuple[int, int]]) -> list[Any]:
    """Queries, keys and values of each run of images; a single run is not copied in the backward pass."""
    if len(runs) == 1:
        return [heads]
    return list(zip(*(x.split([size * images for size, images in runs]) for x in heads), strict=True))


def rotate(qkv: Tensor, cosines: Tensor, sines: Tensor, compiled: bool = False) -> Heads:
    """Queries and keys of [patches, 3, heads, head dim] rotated, in float32, and values.

    `compiled`: one kernel for each pass, compiled once for any number of patches.
    """
    if compiled:
        heads: Heads = _Rotate.apply(qkv, cosines, sines)
        return heads
    query, key, value = qkv.unbind(1)
    return _turned(query, cosines, sines), _turned(key, cosines, sines), value


class _Rotate(torch.autograd.Function):
    """Keeps cosines and sines, which all blocks share. The backward pass rotates the gradients back."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosines: Tensor, sines: Tensor) -> Heads:
        ctx.save_for_backward(cosines, sines)
        forward, _ = compiled_functions()
        query, key = forward(*_any_number(qkv.detach(), cosines, sines))
        return query, key, qkv[:, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _, backward = compiled_functions()
        return backward(*_any_number(*(x.contiguous() for x in gradients), *ctx.saved_tensors)), None, None


def _any_number(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, for whose number of rows compiled code is general; each width has its own."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.mark_static(tensor, list(range(1, tensor.dim())))
    return tensors


@cache
def compiled_functions(backend: Any = "inductor") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`rotated` and `rotated_back`, compiled when they are first called, for any number of patches."""
    return compile_functions(rotated, rotated_back, backend=backend)


def rotated(qkv: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [N, heads, dim] of [N, 3, heads, dim], by cosines and sines [N, dim]."""
    return _turned(qkv[:, 0], cosines, sines), _turned(qkv[:, 1], cosines, sines)


def rotated_back(query: Tensor, key: Tensor, value: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Gradient [N, 3, heads, dim] of those of rotated queries and keys, and of values."""
    return torch.stack((_turned(query, cosines, -sines), _turned(key, cosines, -sines), value), dim=1)


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[N, heads, dim], value i paired with i + dim / 2; both have the same angle."""
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cosines.float()[:, None] + turned * sines.float()[:, None]).to(heads.dtype)


def example(device: torch.device, dtype: torch.dtype, compiled: bool) -> tuple[Tensor, ...]:
    """Heads and the gradient of a few patches."""
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(48, 3, 2, 16, dtype=dtype, device=device, generator=generator).requires_grad_()
    angles = torch.randn(48, 8, device=device, generator=generator).repeat(1, 2)
    heads = rotate(qkv, angles.cos(), angles.sin(), compiled)
    weights = torch.randn(48, 2, 16, device=device, generator=generator)
    sum((x.float() * weights).sum() for x in heads).backward()  # type: ignore[union-attr]
    assert qkv.grad is not None
    return (*(x.detach() for x in heads), qkv.grad)
