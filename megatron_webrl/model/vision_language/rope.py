"""Interleaved multimodal rotary embedding (m-RoPE).

Frequencies alternate between the axes (t h w t h w ... t t), unlike Qwen2-VL's blocks. A text token has t = h = w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Rotation = Callable[[Tensor], Tensor]
"""Rotates queries or keys [T, 1, heads, head dim] of the tokens of a packed sequence."""


def mrope_position_ids(
    token_ids: Tensor, grids: Tensor, image_token_id: int, merge_size: int, prompt_length: int | None = None
) -> Tensor:
    """Positions (t, h, w) of one sample, int64 [3, T], equal to `get_rope_index` of transformers.

    `token_ids`: int [T], each image as t * h * w / merge^2 placeholders. `grids`: int [images, 3], patches (t, h, w) in
    token order. `merge_size`: patches per token along h and w. `prompt_length`: later tokens are a response, in which a
    placeholder token is text. Raises ValueError if placeholders and grids do not match.
    """
    mask = (token_ids == image_token_id).tolist()
    if prompt_length is not None:
        mask[prompt_length:] = [False] * (len(mask) - prompt_length)
    parts: list[Tensor] = []
    done, position = 0, 0  # tokens covered, next text position
    for index, (t, h, w) in enumerate(grids.tolist()):
        start = next((i for i in range(done, len(mask)) if mask[i]), len(mask))
        end = start + t * (h // merge_size) * (w // merge_size)
        if end > len(mask) or not all(mask[start:end]):
            raise ValueError(
                f"image {index} with grid {[t, h, w]} needs {end - start} placeholders (token {image_token_id}) "
                f"at position {start}; the sample has {sum(mask)} of them for {len(grids)} images"
            )
        parts.append(_text(start - done) + position)
        position += start - done
        axes = (torch.arange(t), torch.arange(h // merge_size), torch.arange(w // merge_size))
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1) + position)
        position += max(h, w) // merge_size
        done = end
    if any(mask[done:]):
        raise ValueError(f"{sum(mask[done:])} placeholders (token {image_token_id}) are left after {len(grids)} images")
    parts.append(_text(len(mask) - done) + position)
    return torch.cat(parts, dim=1).to(token_ids.device)


def _text(length: int) -> Tensor:
    return torch.arange(length).expand(3, -1)


class InterleavedRotaryEmbedding(nn.Module):
    """Rotary angles, with the call signature of Megatron's MultimodalRotaryEmbedding."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.dim = dim
        self.base = base

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int], cp_group: Any = None) -> Tensor:
        """Angles float32 [T, B, 1, dim] of int64 [3, B, T]. `mrope_section`: frequencies of t, h and w."""
        # Not a buffer: casting the model to bf16 would round the frequencies.
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=position_ids.device)
        frequencies = 1.0 / self.base ** (exponents / self.dim)
        angles = position_ids[..., None].float() * frequencies  # [3, B, T, dim / 2]
        mixed = angles[0].clone()
        for axis in (1, 2):
            axis_slice = slice(axis, 3 * mrope_section[axis], 3)
            mixed[..., axis_slice] = angles[axis, ..., axis_slice]
        return torch.cat((mixed, mixed), dim=-1).transpose(0, 1)[:, :, None, :]


def make_rotation(angles: Tensor, dtype: torch.dtype, fused: bool) -> Rotation:
    """The rotary embedding by angles float32 [T, 1, 1, dim], for all layers of a pass; values beyond `dim` stay.

    `fused`: one kernel of Transformer Engine, which takes an angle per token if the batch has one sequence. Cosines and
    sines are computed once here, else again for queries and keys of each layer.
    """
    if fused:
        from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

        return partial(fused_apply_rotary_pos_emb, freqs=angles)
    half = angles[..., : angles.shape[-1] // 2]  # the other half is the same
    return partial(rotate, cosines=half.cos().to(dtype), sines=half.sin().to(dtype))


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate [T, 1, heads, head dim] by cosines and sines [T, 1, 1, dim / 2]; value i is paired with i + dim / 2."""
    rotated: Tensor = _Rotate.apply(heads, cosines, sines)
    return rotated


class _Rotate(torch.autograd.Function):
    """Keeps cosines and sines, which all layers share. The backward pass rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(heads, cosines, sines, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(gradient, cosines, sines, -1), None, None


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor, direction: int) -> Tensor:
    width = cosines.shape[-1]
    first, second, rest = heads.split([width, width, heads.shape[-1] - 2 * width], dim=-1)
    result = torch.empty_like(heads)
    torch.mul(first, cosines, out=result[..., :width]).addcmul_(second, sines, value=-direction)
    torch.mul(second, cosines, out=result[..., width : 2 * width]).addcmul_(first, sines, value=direction)
    result[..., 2 * width :] = rest
    return result
