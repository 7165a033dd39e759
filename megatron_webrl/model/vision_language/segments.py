"""Segments of a packed sequence that attend to common prefixes: each to the keys of its ancestors, then to its own.

A segment with parent -1 begins a sequence; the children of a segment continue it. So the common prefix of several
sequences is computed once, and each branch gets the outputs and gradients that it has as a sequence of its own: a
query's attention is over the same keys, and the gradient of a shared key is the sum over its branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


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
