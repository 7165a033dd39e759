"""Prefix tree: the common beginning of several sequences is one segment, computed once; branches attend to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_webrl.trainer.data.flops import sequence_images
from megatron_webrl.trainer.data.merging import MergedSequence

MIN_SHARED_TOKENS = 64  # a shorter common part is computed by each sequence: every segment costs a call of attention
NO_PARENT = -1
_RESPONSE_PLACEHOLDER = -1  # in a response a placeholder is text
_FIRST_IMAGE = -2  # keys of the distinct images count down from here


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `stop` of a sequence, equal in all sequences of its branch."""

    sequence: int  # one of the sequences that have it
    start: int  # position of its first token in the sequence, the number of tokens of its ancestors
    stop: int
    parent: int  # index of the segment before it; NO_PARENT at the beginning of a sequence

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class PrefixTree:
    """Segments of sequences, parents before their children, each computed once."""

    segments: tuple[Segment, ...]
    last_segments: tuple[int, ...]  # of each sequence

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def starts(self) -> np.ndarray:
        """int64 [segments + 1], first token of each segment in a packed sequence, then the number of tokens."""
        return np.cumsum([0, *(segment.length for segment in self.segments)])

    @property
    def parents(self) -> np.ndarray:
        """int64 [segments], parent of each segment or NO_PARENT."""
        return np.array([segment.parent for segment in self.segments], np.int64)

    def path(self, sequence: int) -> list[int]:
        """Segments of a sequence, first to last."""
        path, segment = [], self.last_segments[sequence]
        while segment != NO_PARENT:
            path.append(segment)
            segment = self.segments[segment].parent
        return path[::-1]

    def token_positions(self, sequence: int, length: int) -> np.ndarray:
        """int64 [length], places of a sequence's tokens in the packed sequence. `length`: tokens of the sequence."""
        starts = self.starts
        return np.concatenate([np.arange(starts[s], starts[s + 1]) for s in self.path(sequence)])[:length]


def separate_sequences(sequences: Sequence[MergedSequence]) -> PrefixTree:
    """A tree without common prefixes: each sequence is one segment."""
    segments = tuple(Segment(i, 0, sequence.length, NO_PARENT) for i, sequence in enumerate(sequences))
    return PrefixTree(segments, tuple(range(len(sequences))))


def build_prefix_tree(
    sequences: Sequence[MergedSequence],
    placeholders: Collection[int],
    image_token_id: int,
    merge_size: int,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
) -> PrefixTree:
    """The tree of all common prefixes; a pure function, so that every rank makes the same one.

    Sequences share a token if it and all before it are equal: temperature, text, images and their grids, and whether a
    placeholder is one or text in a response. So an image is never split. `placeholders`: tokens for images or videos.
    `merge_size`: patches per image token along h and w. Segments with several sequences have at least
    `min_shared_tokens` tokens. Raises ValueError if placeholders and grids do not match.
    """
    tree = _Growth(sequences, _keys(sequences, placeholders, image_token_id, merge_size), min_shared_tokens)
    return PrefixTree(tuple(tree.segments), tuple(tree.last_segments))


def restrict_to(tree: PrefixTree, indices: Sequence[int]) -> PrefixTree:
    """The part of a tree with some of its sequences, renumbered in the order of `indices`; computes no more tokens.

    A segment with one remaining child and that child become one segment.
    """
    paths = [tree.path(index) for index in indices]
    user: dict[int, int] = {}  # segment -> first of `indices` with it
    children: dict[int, set[int]] = {}
    for number, path in enumerate(paths):
        for segment in path:
            user.setdefault(segment, number)
        for parent, child in pairwise(path):
            children.setdefault(parent, set()).add(child)
    numbers: dict[int, int] = {}  # segment of `tree` -> segment of the result
    segments: list[Segment] = []
    for path in paths:
        for before, segment in pairwise([NO_PARENT, *path]):
            if segment in numbers:
                continue
            bottom, fused = segment, [segment]
            while len(below := children.get(bottom, set())) == 1:
                (bottom,) = below
                fused.append(bottom)
            numbers |= dict.fromkeys(fused, len(segments))
            start, stop = tree.segments[segment].start, tree.segments[bottom].stop
            segments.append(Segment(user[bottom], start, stop, numbers.get(before, NO_PARENT)))
    return PrefixTree(tuple(segments), tuple(numbers[path[-1]] for path in paths))


def _keys(
    sequences: Sequence[MergedSequence], placeholders: Collection[int], image_token_id: int, merge_size: int
) -> list[np.ndarray]:
    """int32 [n] of each sequence: its tokens, where the placeholders of each distinct image have a number of it."""
    numbers: dict[tuple[bytes, tuple[int, int, int]], int] = {}
    keys = []
    for sequence in sequences:
        key = sequence.tokens.astype(np.int32)
        response = key[sequence.response_positions]
        key[sequence.response_positions] = np.where(
            np.isin(response, sorted(placeholders)), _RESPONSE_PLACEHOLDER, response
        )
        places = np.flatnonzero(key == image_token_id)
        images = [numbers.setdefault(image, _FIRST_IMAGE - len(numbers)) for image in sequence_images(sequence)]
        repeated = np.repeat(np.array(images, np.int32), sequence.grids.prod(axis=1) // merge_size**2)
        if len(repeated) != len(places):
            raise ValueError(
                f"a sequence has {len(places)} placeholders (token {image_token_id}) for {len(repeated)} image tokens"
            )
        key[places] = repeated
        keys.append(key)
    return keys


class _Growth:
    """Sequences sorted by their keys, so that those with a common prefix are neighbours, and the segments of them."""

    def __init__(self, sequences: Sequence[MergedSequence], keys: Sequence[np.ndarray], minimum: int) -> None:
        self.keys, self.minimum = keys, minimum
        self.segments: list[Segment] = []
        self.last_segments = [NO_PARENT] * len(keys)
        temperatures = [sequence.temperature for sequence in sequences]
        # Any order in which equal prefixes are neighbours will do.
        self.order = sorted(range(len(keys)), key=lambda i: (temperatures[i], keys[i].tobytes(), i))
        self.common = [0] * len(keys)  # tokens that each of the sorted sequences shares with the one before
        for place, (one, other) in enumerate(pairwise(self.order), 1):
            if temperatures[one] == temperatures[other]:
                self.common[place] = _common_length(keys[one], keys[other])
        pending = [(0, len(keys), 0, NO_PARENT)]
        while pending:
            pending += self._branches(*pending.pop())

    def _branches(self, first: int, end: int, depth: int, parent: int) -> list[tuple[int, int, int, int]]:
        """Add the segments after `depth` tokens of the sorted sequences `first` to `end`; returns what is left."""
        cuts = [i for i in range(first + 1, end) if self.common[i] < depth + self.minimum]
        left = []
        for low, high in pairwise([first, *cuts, end]):
            index = self.order[low]
            if high - low > 1:
                stop = min(self.common[low + 1 : high])
                left.append((low, high, stop, self._add(Segment(index, depth, stop, parent))))
            elif len(self.keys[index]) > depth:
                self.last_segments[index] = self._add(Segment(index, depth, len(self.keys[index]), parent))
            else:
                self.last_segments[index] = parent
        return left

    def _add(self, segment: Segment) -> int:
        self.segments.append(segment)
        return len(self.segments) - 1


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Number of equal elements at the beginning."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
