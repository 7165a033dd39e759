"""The vision tower of transformers, replicated on every tensor- and context-parallel rank of the first stage.

The ranks partition the images of a packed sequence and gather the features, so each image is encoded once. In the
backward pass the gradient of the gathered features is complete on every tensor-parallel rank and is summed over the
context-parallel ranks, each of which has a part of the tokens; each rank then runs backward through its own images.
`gradients.finalize_gradients` and Megatron's data-parallel reduction sum the tower's gradients over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from megatron_webrl.model.qwen3_vl.packed_input import PackedInput, partition_images
from megatron_webrl.system import torchvision_shim


@dataclass(frozen=True)
class VisualFeatures:
    """Features of all image tokens of a row, in token order, on every tensor-parallel rank."""

    embeddings: Tensor  # [V, hidden], stand in for the placeholders' embeddings
    deepstack: tuple[Tensor, ...]  # per early layer of the text model: [V, hidden]


def build_vision_tower(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A vision tower from a transformers vision configuration, with arbitrary weights.

    Dense models and mixtures of experts have the same tower.
    """
    torchvision_shim.install()
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    with torch.device(device):
        # `dtype` here leaves the rotary frequencies in float32; a later cast would not.
        tower = Qwen3VLVisionModel._from_config(config, dtype=dtype, attn_implementation="sdpa")
    tower.patch_embed.forward = partial(_embed_patches, tower.patch_embed.proj)
    return tower


def _embed_patches(convolution: nn.Conv3d, patches: Tensor) -> Tensor:
    """[patches, hidden] from [patches, dim]: a convolution whose steps are its kernel, as the matrix product it is.

    On the CPU it takes a tenth of the convolution's time.
    """
    return linear(patches.to(convolution.weight.dtype), convolution.weight.flatten(1), convolution.bias)


def encode_images(
    tower: Any, row: PackedInput, merge: int, group: ProcessGroup, context: ProcessGroup
) -> VisualFeatures | None:
    """Features of the row's images, each encoded once; None for a row without images.

    `group`: the tensor- and context-parallel ranks, which share the images; `context`: those among them that share
    the tokens. Collective over `group`.
    """
    if not row.grids.numel():
        return None
    if tower.rotary_pos_emb.inv_freq.dtype is not torch.float32:
        raise TypeError("the vision tower's rotary frequencies were cast; choose the type when the model is built")
    tokens = (row.grids.prod(dim=-1) // merge**2).tolist()
    shares = partition_images(row.grids.tolist(), get_pg_size(group))
    mine = shares[get_pg_rank(group)]
    features = _encode(tower, row.grids[mine], _pixels(row, mine)) if mine else _nothing(tower)
    if len(shares) > 1:
        features = _gather(features, [sum(tokens[i] for i in share) for share in shares], group, context)
    order = [image for share in shares for image in share]
    images = range(len(tokens)) if row.image_indices is None else row.image_indices.tolist()
    features = features.index_select(0, _token_order(tokens, order, images).to(features.device))
    embeddings, *deepstack = features.chunk(1 + len(tower.deepstack_visual_indexes), dim=1)
    return VisualFeatures(embeddings, tuple(deepstack))


def _encode(tower: Any, grids: Tensor, pixels: Tensor) -> Tensor:
    """[tokens, (1 + DeepStack features) * hidden] of some images."""
    output = tower(pixels.to(tower.patch_embed.proj.weight.dtype), grid_thw=grids, return_dict=True)
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def _nothing(tower: Any) -> Tensor:
    """The features of no image; they take a gradient like any other, for the gathering is collective backward, too."""
    weight = tower.merger.linear_fc2.weight
    width = weight.shape[0] * (1 + len(tower.deepstack_visual_indexes))
    return weight.new_empty(0, width).requires_grad_(weight.requires_grad and torch.is_grad_enabled())


def _pixels(row: PackedInput, mine: list[int]) -> Tensor:
    """Patches of the given images. Raises ValueError if the row holds those of other images."""
    if row.local_images is not None:
        if row.local_images.tolist() != mine:
            raise ValueError(
                f"row.pixels holds the images {row.local_images.tolist()}, but this tensor-parallel rank encodes {mine}"
            )
        return row.load_pixels()
    patches = row.grids.prod(dim=-1).tolist()
    parts = row.load_pixels().split(patches)
    return torch.cat([parts[i] for i in mine])


def _token_order(tokens: list[int], order: list[int], images: Any) -> Tensor:
    """int64 [V]: for each image token of the row, its index among the tokens of the images in `order`."""
    starts, start = {}, 0
    for image in order:
        starts[image] = start
        start += tokens[image]
    return torch.cat([torch.arange(starts[i], starts[i] + tokens[i]) for i in images])


def _gather(mine: Tensor, counts: list[int], group: ProcessGroup, context: ProcessGroup) -> Tensor:
    gathered: Tensor = _Gather.apply(mine, counts, group, context)
    return gathered


class _Gather(torch.autograd.Function):
    """All ranks' features in the order of ranks. Backward, each rank takes its part of the whole gradient."""

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
        """This rank's rows."""
        gradient = gradients[0]
        if get_pg_size(ctx.context) > 1:
            gradient = gradient.contiguous().clone()
            torch.distributed.all_reduce(gradient, group=ctx.context)
        return gradient[ctx.start : ctx.end], None, None, None
