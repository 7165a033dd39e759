"""Packed input: segments that attend to common prefixes, m-RoPE positions, images.

A segment with parent -1 begins a sequence; the children of a segment continue it. So the common prefix of several
sequences is computed once, and each branch gets the outputs and gradients that it has as a sequence of its own: a
query's attention is over the same keys, and the gradient of a shared key is the sum over its branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class SegmentKeys:
    """The keys of each segment, as positions in the packed sequence."""

    ranges: tuple[tuple[tuple[int, int], ...], ...]  # of each segment: (first, end), adjacent ranges joined

    @property
    def lengths(self) -> list[int]:
        """Number of keys of each segment."""
        return [sum(end - first for first, end in each) for each in self.ranges]

    @property
    def boundaries(self) -> list[int]:
        """[segments + 1], first key of each segment where the keys of all segments follow each other."""
        return [0, *accumulate(self.lengths)]

    @property
    def positions(self) -> Tensor:
        """int64 [keys], the keys of all segments; a key of a common prefix is there once for each branch."""
        return torch.cat([torch.arange(first, end) for each in self.ranges for first, end in each])


def segment_keys(parents: Sequence[int], boundaries: Sequence[int]) -> SegmentKeys | None:
    """The keys of each segment; None if no segment has a parent.

    `parents`: [segments], the index of an earlier segment, or -1. `boundaries`: [segments + 1], first token of each
    segment. Raises ValueError for another parent.
    """
    ranges: list[tuple[tuple[int, int], ...]] = []
    for index, (parent, own) in enumerate(zip(parents, pairwise(boundaries), strict=True)):
        if not -1 <= parent < index:
            raise ValueError(f"segment {index} has the parent {parent}; it must be -1 or an earlier segment")
        above = ranges[parent] if parent >= 0 else ()
        if above and above[-1][1] == own[0]:
            ranges.append((*above[:-1], (above[-1][0], own[1])))
        else:
            ranges.append((*above, own))
    return SegmentKeys(tuple(ranges)) if any(parent >= 0 for parent in parents) else None


def select_keys(tokens: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Keys or values [1, heads, keys, dim] of a segment from those of all tokens [1, heads, T, dim]."""
    parts = [tokens[:, :, first:end] for first, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def causal_mask(query: Tensor, keys: int) -> Tensor:
    """[queries, keys] in the dtype of `query` [1, heads, queries, dim]: 0 for visible keys, else -inf.

    The last query sees all keys.
    """
    queries = query.shape[2]
    return query.new_full((queries, keys), -torch.inf).triu(diagonal=keys - queries + 1)


HOST_FIELDS = ("cu_seqlens", "parents", "grids", "image_indices", "local_images", "image_token_positions")
NOT_RECORDED = -1  # in place of each expert of a token whose experts are not known: the router chooses


@dataclass(frozen=True)
class PackedInput:
    """Packed segments, each of which attends to itself and to its ancestors.

    A segment is a whole sample, or the part of samples after a common prefix, which is the segment's parent.

    The tensors of HOST_FIELDS lie in host memory: they determine shapes, which the host would wait for. The others lie
    on one device.

    `pixels`: patches of all images, or of `local_images` in that order: the images that this rank encodes by
    `partition_images` (none on later pipeline stages). Ranks that encode images call a callable once per pass.
    """

    tokens: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [3, T], m-RoPE (t, h, w), those of the token in its sample
    cu_seqlens: Tensor  # int32 [segments + 1], 0 first and T last
    pixels: Tensor | Callable[[], Tensor]  # float32 [patches, dim]
    grids: Tensor  # int64 [images, 3], patches (t, h, w) of each image
    scored_positions: Tensor  # int64 [R], positions whose next token is scored, all in this rank's `token_range`
    image_indices: Tensor | None = None  # int64 [occurrences], index in grids of each; None: each image once, in order
    local_images: Tensor | None = None  # int64, indices into grids of the images in `pixels`
    image_token_positions: Tensor | None = None  # int64 [V], placeholders; text may hold the token, too; None: all
    parents: Tensor | None = None  # int64 [segments], an earlier segment, or -1: none; None: no segment has a parent
    value_rows: Tensor | None = None  # int64 [values], indices in scored_positions at which a value head is applied
    experts: Tensor | None = (
        None  # int16 [T, MoE layers, top_k], experts of each token, or NOT_RECORDED; None: no token's
    )

    def load_pixels(self) -> Tensor:
        """float32 [patches, dim]: `pixels`, or the result of calling it."""
        return self.pixels if isinstance(self.pixels, Tensor) else self.pixels()

    def to(self, device: torch.device) -> PackedInput:
        """Copy all tensors but those of HOST_FIELDS to a device."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and name not in HOST_FIELDS}
        moved: dict[str, Any] = {name: x.to(device) for name, x in tensors.items()}
        return replace(self, **moved)


def token_range(num_tokens: int, rank: int, ranks: int, multiple: int = 1) -> range:
    """Positions of a packed sequence that rank `rank` of `ranks` holds.

    All ranks hold the same number, a multiple of `multiple`; positions of the last ranks may exceed `num_tokens`.
    """
    length = -(-num_tokens // (ranks * multiple)) * multiple
    return range(rank * length, (rank + 1) * length)


def pad_to_multiple(packed: PackedInput, multiple: int) -> PackedInput:
    """Pad the sequence to a multiple of tokens with an extra segment that is not scored."""
    missing = -packed.tokens.numel() % multiple
    if not missing:
        return packed
    end = packed.cu_seqlens.new_tensor([packed.tokens.numel() + missing])
    return replace(
        packed,
        tokens=torch.cat([packed.tokens, packed.tokens.new_zeros(missing)]),
        position_ids=torch.cat([packed.position_ids, packed.position_ids.new_zeros(3, missing)], dim=1),
        cu_seqlens=torch.cat([packed.cu_seqlens, end]),
        parents=None if packed.parents is None else torch.cat([packed.parents, packed.parents.new_tensor([-1])]),
        experts=None if packed.experts is None else pad(packed.experts, (0, 0, 0, 0, 0, missing), value=NOT_RECORDED),
    )


def partition_images(grids: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Image indices per rank, ascending: largest first, to the rank with the fewest patches. `grids`: (t, h, w)."""
    return [sorted(share) for share in partition_costs([t * h * w for t, h, w in grids], ranks, len(grids))]


def partition_costs(costs: Sequence[float], parts: int, capacity: int) -> list[list[int]]:
    """Indices of `costs` in `parts` of at most `capacity` each: the most expensive first, to the least loaded part."""
    result: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = min((p for p in range(parts) if len(result[p]) < capacity), key=lambda p: (loads[p], p))
        result[part].append(index)
        loads[part] += costs[index]
    return result
