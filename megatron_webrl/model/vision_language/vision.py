"""The vision tower and its attention.

The vision tower of transformers, replicated on every tensor- and context-parallel rank of the first stage.

The ranks partition the images of a packed sequence and gather the features, so each image is encoded once. In the
backward pass the gradient of the features, complete on every tensor-parallel rank, is summed over context-parallel
ranks; each rank continues with its own images. `gradients.finalize_gradients` and Megatron's data-parallel reduction
sum the tower's gradients over the ranks.

Attention of the vision tower: one call for neighbouring images of equal size, and a compiled rotary embedding.

transformers calls attention for each image, and its rotary embedding takes a dozen operations on float32 copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, scaled_dot_product_attention

from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.vision_language.compilation import compile_functions
from megatron_webrl.model.vision_language.packed_input import PackedInput, partition_images
from megatron_webrl.util import torchvision_shim

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


@dataclass(frozen=True)
class VisualFeatures:
    """Features of all image tokens in token order, on every tensor-parallel rank."""

    embeddings: Tensor  # [V, hidden], replace the embeddings of the placeholders
    deepstack: tuple[Tensor, ...]  # [V, hidden] for each of the first layers of the text model


def build_vision_tower(config: Any, dtype: torch.dtype, device: torch.device, compiled: bool = False) -> nn.Module:
    """Build a vision tower with arbitrary weights from a transformers vision config, of a dense model or of experts.

    `compiled`: its rotary embedding.
    """
    torchvision_shim.install()
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    kind: Any = Qwen3VLVisionModel if hasattr(config, "deepstack_visual_indexes") else Qwen3_5VisionModel
    with torch.device(device):
        # `dtype` keeps the rotary frequencies in float32; a later cast would not.
        tower = kind._from_config(config, dtype=dtype, attn_implementation="sdpa")
    replace_attention(tower, compiled)
    tower.patch_embed.forward = partial(_embed_patches, tower.patch_embed.proj)
    return tower


def _embed_patches(convolution: nn.Conv3d, patches: Tensor) -> Tensor:
    """Embed patches: [patches, dim] -> [patches, hidden]. On the CPU this takes a tenth of the equal convolution."""
    return linear(patches.to(convolution.weight.dtype), convolution.weight.flatten(1), convolution.bias)


def encode_images(
    tower: Any, packed: PackedInput, merge: int, group: ProcessGroup, context: ProcessGroup
) -> VisualFeatures | None:
    """Features of the images, each encoded once; None without images. Collective over `group`.

    `group`: tensor- and context-parallel ranks, which share the images; `context`: ranks that share the tokens.
    """
    if not packed.grids.numel():
        return None
    if tower.rotary_pos_emb.inv_freq.dtype is not torch.float32:
        raise TypeError("the vision tower's rotary frequencies were cast; choose the dtype in build_model")
    tokens = (packed.grids.prod(dim=-1) // merge**2).tolist()
    shares = partition_images(packed.grids.tolist(), get_pg_size(group))
    mine = shares[get_pg_rank(group)]
    features = _encode(tower, packed.grids[mine], _pixels(packed, mine)) if mine else _no_features(tower)
    if len(shares) > 1:
        features = _gather(features, [sum(tokens[i] for i in share) for share in shares], group, context)
    order = [image for share in shares for image in share]
    images = range(len(tokens)) if packed.image_indices is None else packed.image_indices.tolist()
    features = features.index_select(0, copy_to_device(_token_order(tokens, order, images), features.device))
    embeddings, *deepstack = features.chunk(1 + _deepstack_layers(tower), dim=1)
    return VisualFeatures(embeddings, tuple(deepstack))


def _deepstack_layers(tower: Any) -> int:
    """Number of DeepStack features of each image token; a tower of Qwen3.5 has none."""
    return len(getattr(tower, "deepstack_visual_indexes", ()))


def _encode(tower: Any, grids: Tensor, pixels: Tensor) -> Tensor:
    """Encode images: [tokens, (1 + DeepStack features) * hidden]. `grids` are on the host, `pixels` on the device."""
    from transformers import vision_utils

    # From grids on the device the tower would compute these itself and wait for the device 3 times in each block.
    size = {"num_grid_per_side": tower.num_grid_per_side, "spatial_merge_size": tower.spatial_merge_size}
    kind = {"mode": tower.interpolation_mode, "align_corners": tower.interpolation_align_corners}
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(grids, **size, **kind)
    output = tower(
        pixels.to(tower.patch_embed.proj.weight.dtype),
        grid_thw=grids,
        cu_seqlens=vision_utils.get_vision_cu_seqlens(grids),
        position_ids=copy_to_device(
            vision_utils.get_vision_position_ids(grids, tower.spatial_merge_size), pixels.device
        ),
        interp_indices=copy_to_device(indices, pixels.device),
        interp_weights=copy_to_device(weights, pixels.device),
        return_dict=True,
    )
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=1)


def _no_features(tower: Any) -> Tensor:
    """Features [0, width] of no image; they take part in autograd because the backward pass is collective, too."""
    weight = tower.merger.linear_fc2.weight
    width = weight.shape[0] * (1 + _deepstack_layers(tower))
    return weight.new_empty(0, width).requires_grad_(weight.requires_grad and torch.is_grad_enabled())


def _pixels(packed: PackedInput, mine: list[int]) -> Tensor:
    """Patches of the images `mine`. Raises ValueError if the input holds patches of other images."""
    if packed.local_images is not None:
        if packed.local_images.tolist() != mine:
            raise ValueError(
                f"pixels holds the images {packed.local_images.tolist()}, but this tensor-parallel rank encodes {mine}"
            )
        return packed.load_pixels()
    patches = packed.grids.prod(dim=-1).tolist()
    parts = packed.load_pixels().split(patches)
    return torch.cat([parts[i] for i in mine])


def _token_order(tokens: list[int], order: list[int], images: Any) -> Tensor:
    """int64 [V]: for each image token of the sequence, its index among the tokens of the images in `order`."""
    starts, start = {}, 0
    for image in order:
        starts[image] = start
        start += tokens[image]
    return torch.cat([torch.arange(starts[i], starts[i] + tokens[i]) for i in images])


def _gather(mine: Tensor, counts: list[int], group: ProcessGroup, context: ProcessGroup) -> Tensor:
    gathered: Tensor = _Gather.apply(mine, counts, group, context)
    return gathered


class _Gather(torch.autograd.Function):
    """All-gather of features in rank order. In the backward pass each rank takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: list[int], group: ProcessGroup, context: ProcessGroup) -> Tensor:
        rank, longest = get_pg_rank(group), max(counts)
        padded = mine.new_zeros(longest, mine.shape[1])
        padded[: counts[rank]] = mine
        gathered = mine.new_empty(len(counts) * longest, mine.shape[1])
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        ctx.start, ctx.end, ctx.context = sum(counts[:rank]), sum(counts[: rank + 1]), context
        parts = gathered.split(longest)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of this rank's features."""
        gradient = gradients[0]
        if get_pg_size(ctx.context) > 1:
            gradient = gradient.contiguous().clone()
            torch.distributed.all_reduce(gradient, group=ctx.context)
        return gradient[ctx.start : ctx.end], None, None, None
