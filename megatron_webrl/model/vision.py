"""The vision tower: transformers' own, whole on every tensor-parallel rank of the first stage.

Every rank encodes every image of its row. What leaves the tower enters replicated activations, whose gradient
Megatron already makes the same on all ranks, so the tower's gradients need no reduction over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_webrl import compat
from megatron_webrl.model.inputs import PackedRow


@dataclass(frozen=True)
class VisualFeatures:
    """Features of all image tokens of a row, in token order."""

    embeddings: Tensor  # [V, hidden], stand in for the placeholders' embeddings
    deepstack: tuple[Tensor, ...]  # per early layer of the text model: [V, hidden]


def build_tower(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A Qwen3VLVisionModel from a Qwen3VLVisionConfig, with arbitrary weights."""
    compat.install()
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    with torch.device(device):
        # `dtype` here leaves the rotary frequencies in float32; a later cast would not.
        return Qwen3VLVisionModel._from_config(config, dtype=dtype, attn_implementation="sdpa")


def encode(tower: Any, row: PackedRow, merge: int) -> VisualFeatures | None:
    """Features of the row's images, each encoded once; None for a row without images."""
    if not row.grids.numel():
        return None
    if tower.rotary_pos_emb.inv_freq.dtype is not torch.float32:
        raise TypeError("the vision tower's rotary frequencies were cast; choose the type when the model is built")
    pixels = row.pixels.to(tower.patch_embed.proj.weight.dtype)
    output = tower(pixels, grid_thw=row.grids, return_dict=True)
    embeddings, deepstack = output.pooler_output, tuple(output.deepstack_features)
    if row.images is not None:
        index = _occurrences(row.grids.prod(dim=-1) // merge**2, row.images)
        embeddings = embeddings.index_select(0, index)
        deepstack = tuple(features.index_select(0, index) for features in deepstack)
    return VisualFeatures(embeddings, deepstack)


def _occurrences(sizes: Tensor, images: Tensor) -> Tensor:
    """int64 [V]: for each image token of the row, its index among the tokens of the given images."""
    starts = (sizes.cumsum(0) - sizes).tolist()
    tokens = sizes.tolist()
    return torch.cat([torch.arange(starts[i], starts[i] + tokens[i], device=sizes.device) for i in images.tolist()])
