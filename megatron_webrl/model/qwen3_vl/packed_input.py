"""The input of one forward pass: a row of samples packed back to back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedInput:
    """Several samples back to back. Every sample attends to itself only. All tensors lie on one device.

    An image that occurs several times in a row can be given once: `images` then tells, for each occurrence in
    token order, which of the given images it is. Without `images`, the given images occur once each, in order.
    `visual` tells placeholders from the same token in a response, where it stands for no image. Without `visual`,
    every such token is a placeholder.

    `pixels` holds the patches of all given images, or of those that `encoded` names, in its order: the images that
    this rank encodes by `image_shares` (on later pipeline stages, none). Instead of them it can be what makes them: the
    ranks that encode images of the row call it once a pass. Under context parallelism `predict` lists only positions
    of this rank's `token_share`.

    Raises ValueError if shapes do not fit together.
    """

    tokens: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [3, T], m-RoPE (t, h, w), restarting at each sample
    cu_seqlens: Tensor  # int32 [samples + 1], 0 first and T last
    pixels: Tensor | Callable[[], Tensor]  # float32 [patches, dim], the patches of all given images
    grids: Tensor  # int64 [images, 3], patches (t, h, w) of each given image
    scored_positions: Tensor  # int64 [R], row positions whose next token is scored
    image_indices: Tensor | None = None  # int64 [occurrences], indices into grids
    local_images: Tensor | None = None  # int64, indices into grids of the images whose patches `pixels` holds
    image_token_positions: Tensor | None = None  # int64 [V], row positions of the image placeholders

    def __post_init__(self) -> None:
        length = self.tokens.numel()
        for name, tensor, shape in (
            ("tokens", self.tokens, (None,)),
            ("position_ids", self.position_ids, (3, length)),
            ("cu_seqlens", self.cu_seqlens, (None,)),
            ("pixels", self.pixels, (None, None)),
            ("grids", self.grids, (None, 3)),
            ("scored_positions", self.scored_positions, (None,)),
        ):
            if not isinstance(tensor, Tensor):
                continue
            found = tuple(tensor.shape)
            fits = len(found) == len(shape) and all(s is None or s == f for s, f in zip(shape, found, strict=True))
            if not fits:
                raise ValueError(f"row.{name} has shape {list(found)}, expected {list(shape)} (None: any size)")
        if self.cu_seqlens.numel() < 2:
            raise ValueError(f"row.cu_seqlens has {self.cu_seqlens.numel()} entries; a row needs at least one sample")

    def load_pixels(self) -> Tensor:
        """float32 [patches, dim]: `pixels`, made if need be."""
        return self.pixels if isinstance(self.pixels, Tensor) else self.pixels()

    def to(self, device: torch.device) -> PackedInput:
        """The same row on another device."""
        moved: dict[str, Any] = {
            name: tensor.to(device) if isinstance(tensor, Tensor) else tensor for name, tensor in vars(self).items()
        }
        return replace(self, **moved)


def token_range(num_tokens: int, rank: int, ranks: int, multiple: int = 1) -> range:
    """The positions of a row that rank `rank` of `ranks` holds, in order.

    All ranks hold equally many, a multiple of `multiple`: the last ones' may lie beyond the row's `tokens`.
    """
    length = -(-num_tokens // (ranks * multiple)) * multiple
    return range(rank * length, (rank + 1) * length)


def pad_to_multiple(packed: PackedInput, multiple: int) -> PackedInput:
    """The row with as many more tokens as make their number a multiple: a sample of their own that nobody scores."""
    missing = -packed.tokens.numel() % multiple
    if not missing:
        return packed
    end = packed.cu_seqlens.new_tensor([packed.tokens.numel() + missing])
    return replace(
        packed,
        tokens=torch.cat([packed.tokens, packed.tokens.new_zeros(missing)]),
        position_ids=torch.cat([packed.position_ids, packed.position_ids.new_zeros(3, missing)], dim=1),
        cu_seqlens=torch.cat([packed.cu_seqlens, end]),
    )


def partition_images(grids: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Which of the images each of `ranks` tensor-parallel ranks encodes: most patches first, to the least loaded.

    `grids`: patches (t, h, w) of each image. Each rank's indices rise.
    """
    patches = [t * h * w for t, h, w in grids]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(patches)), key=lambda i: (-patches[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += patches[index]
    return [sorted(share) for share in shares]
