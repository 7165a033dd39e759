"""Prefix merging: what steps and sequences have in common is computed once.

Steps of a trajectory that extend each other become one sequence (`merge_prefixes`); the common beginning of several
sequences is one segment of a tree, to which their branches attend (`build_prefix_tree`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED
from megatron_webrl.trainer.data.batching import TrainingSample

MIN_SHARED_TOKENS = 64  # a shorter common part is computed by each sequence: every segment costs a call of attention
NO_PARENT = -1
_RESPONSE_PLACEHOLDER = -1  # in a response a placeholder is text
_FIRST_IMAGE = -2  # keys of the distinct images count down from here


@dataclass(frozen=True)
class MergedSequence:
    """One step, or several that extend each other: attention is causal, so a response sees exactly its context."""

    samples: tuple[TrainingSample, ...]  # in the order of their responses
    tokens: np.ndarray  # int32 [n], prompt and response of the last step, which contains all others
    response_positions: np.ndarray  # int64 [r], ascending positions of all steps' response tokens

    @property
    def length(self) -> int:
        """Tokens of prompts and responses."""
        return len(self.tokens)

    @property
    def images(self) -> tuple[bytes, ...]:
        """Encoded images, in token order."""
        return self.samples[-1].images

    @property
    def grids(self) -> np.ndarray:
        """int32 [images, 3], patches (t, h, w)."""
        return self.samples[-1].grids

    @property
    def temperature(self) -> float:
        """Sampling temperature of all steps."""
        return self.samples[-1].temperature


def unmerged_sequence(sample: TrainingSample) -> MergedSequence:
    """A sequence of one step."""
    tokens = np.concatenate([sample.prompt, sample.response])
    return MergedSequence((sample,), tokens, np.arange(len(sample.prompt), len(tokens)))


def unique_images(sequences: Iterable[MergedSequence]) -> list[tuple[bytes, tuple[int, int, int]]]:
    """The images of packed sequences with their grids, each once, in token order."""
    return list(dict.fromkeys(image for sequence in sequences for image in sequence_images(sequence)))


def sequence_images(sequence: MergedSequence) -> list[tuple[bytes, tuple[int, int, int]]]:
    """All images of a sequence with their grids, in token order."""
    return [(data, (t, h, w)) for data, (t, h, w) in zip(sequence.images, sequence.grids.tolist(), strict=True)]


def merge_prefixes(samples: Sequence[TrainingSample], placeholders: Collection[int]) -> list[MergedSequence]:
    """Merge samples that share a prefix; each sample is in exactly one sequence, whatever the order of `samples`.

    A step joins the longest sequence of its trajectory that is a prefix of its prompt, with the same images, grids and
    temperature; else it starts one. It never extends a response with one of `placeholders`, tokens for images or
    videos: in a response they are text, but the engine treats them as images once they are part of a prompt.
    Sequences come in the order of their trajectories' first samples, shorter ones of a trajectory first.
    """
    trajectories: dict[tuple[int, int], list[TrainingSample]] = {}
    for sample in samples:
        trajectories.setdefault(sample.trajectory_id, []).append(sample)
    forbidden = np.array(sorted(placeholders))
    return [sequence for steps in trajectories.values() for sequence in _merge_steps(steps, forbidden)]


def _merge_steps(steps: Sequence[TrainingSample], forbidden: np.ndarray) -> list[MergedSequence]:
    merged: list[MergedSequence] = []
    # A step is longer than its prefix, so this order visits prefixes first.
    for sample in sorted(steps, key=lambda s: s.length):
        step = unmerged_sequence(sample)
        prefixes = [index for index, sequence in enumerate(merged) if _extends(step, sequence, forbidden)]
        if prefixes:
            index = max(prefixes, key=lambda i: merged[i].length)
            base = merged[index]
            merged[index] = MergedSequence(
                (*base.samples, sample), step.tokens, np.concatenate([base.response_positions, step.response_positions])
            )
        else:
            merged.append(step)
    return merged


def _extends(step: MergedSequence, prefix: MergedSequence, forbidden: np.ndarray) -> bool:
    """Whether the prompt of `step` begins with all of `prefix`."""
    shared = len(prefix.images)
    return bool(
        len(step.samples[0].prompt) >= prefix.length
        and step.temperature == prefix.temperature
        and step.images[:shared] == prefix.images
        and np.array_equal(step.grids[:shared], prefix.grids)
        and np.array_equal(step.tokens[: prefix.length], prefix.tokens)
        and not np.isin(prefix.samples[-1].response, forbidden).any()
    )


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
    keys = _keys(sequences, placeholders, image_token_id, merge_size)
    temperatures = [sequence.temperature for sequence in sequences]
    # Any order in which equal prefixes are neighbours will do.
    order = sorted(range(len(keys)), key=lambda i: (temperatures[i], keys[i].tobytes(), i))
    common = [0] * len(keys)  # tokens that each of the sorted sequences shares with the one before
    for place, (one, other) in enumerate(pairwise(order), 1):
        if temperatures[one] == temperatures[other]:
            common[place] = _common_length(keys[one], keys[other])
    segments: list[Segment] = []
    last_segments = [NO_PARENT] * len(keys)
    pending = [(0, len(keys), 0, NO_PARENT)]  # first and end of sorted sequences, shared tokens, their last segment
    while pending:
        first, end, depth, parent = pending.pop()
        cuts = [i for i in range(first + 1, end) if common[i] < depth + min_shared_tokens]
        for low, high in pairwise([first, *cuts, end]):
            index, last = order[low], parent
            stop = min(common[low + 1 : high], default=len(keys[index]))
            if stop > depth:
                last = len(segments)
                segments.append(Segment(index, depth, stop, parent))
            if high - low > 1:
                pending.append((low, high, stop, last))
            else:
                last_segments[index] = last
    return PrefixTree(tuple(segments), tuple(last_segments))


def restrict_to(tree: PrefixTree, indices: Sequence[int]) -> PrefixTree:
    """The part of a tree with some of its sequences, renumbered in the order of `indices`; computes no more tokens.

    A segment with one remaining child and that child become one segment.
    """
    paths = [tree.path(index) for index in indices]
    children: dict[int, set[int]] = defaultdict(set)
    for parent, child in (pair for path in paths for pair in pairwise(path)):
        children[parent].add(child)
    numbers: dict[int, int] = {}  # segment of `tree` -> segment of the result
    segments: list[Segment] = []
    for user, path in enumerate(paths):
        for before, number in pairwise([NO_PARENT, *path]):
            if number in numbers:
                continue
            segment, place = tree.segments[number], numbers.get(before, NO_PARENT)
            if len(children[before]) == 1:
                segments[place] = replace(segments[place], sequence=user, stop=segment.stop)
                numbers[number] = place
            else:
                numbers[number] = len(segments)
                segments.append(replace(segment, sequence=user, parent=place))
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


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Number of equal elements at the beginning."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def packed_experts(sequences: Sequence[MergedSequence], tree: PrefixTree) -> np.ndarray | None:
    """int16 [T, MoE layers, top_k], see PackedInput.experts; None if no step has recorded experts.

    A segment that several sequences share gets the experts of the one with the newest token among those that have any:
    its experts are those of the weights nearest to the trainer's.
    """
    found = {index: experts for index, each in enumerate(sequences) if (experts := sequence_experts(each)) is not None}
    if not found:
        return None
    source: dict[int, int] = {}  # segment -> the sequence whose experts it gets
    for index in sorted(found, key=lambda index: (_newest_version(sequences[index]), index)):
        # A segment may go beyond the end of a sequence that is a prefix of another.
        whole = [each for each in tree.path(index) if tree.segments[each].stop <= len(found[index])]
        source |= dict.fromkeys(whole, index)
    unknown = next(iter(found.values()))[:0]
    parts = []
    for number, segment in enumerate(tree.segments):
        if number in source:
            parts.append(found[source[number]][segment.start : segment.stop])
        else:
            parts.append(np.full((segment.length, *unknown.shape[1:]), NOT_RECORDED, np.int16))
    return np.concatenate(parts)


def _newest_version(sequence: MergedSequence) -> int:
    return max(int(sample.versions.max()) for sample in sequence.samples)


def sequence_experts(sequence: MergedSequence) -> np.ndarray | None:
    """int16 [tokens, MoE layers, top_k] of merged steps; None if none of them has recorded experts.

    A token that several steps have gets the experts of the last of them: with these, or the same ones, the engine
    computed the keys and values that the responses after it saw.
    """
    recorded = [sample.experts for sample in sequence.samples if sample.experts is not None]
    if not recorded:
        return None
    merged = np.full((sequence.length, *recorded[0].shape[1:]), NOT_RECORDED, np.int16)
    for experts in recorded:
        rows = experts[:, 0, 0] != np.iinfo(experts.dtype).max
        merged[: len(experts)][rows] = experts[rows]
    return merged
