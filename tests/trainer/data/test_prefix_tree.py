"""The tree of common prefixes: complete, token by token; the limits of what is shared; packing with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_webrl.trainer.data.packing import MAX_SEQUENCE_TOKENS_RATIO, pack_sequences
from megatron_webrl.trainer.data.prefix_merging import (
    NO_PARENT,
    MergedSequence,
    PrefixTree,
    build_prefix_tree,
    restrict_to,
    unmerged_sequence,
)
from tests.trainer.data.test_packing import COST
from tests.trainer.growing_prompts import random_tokens, step

IMAGE, VIDEO = 500, 501
GRIDS = {b"small": (1, 4, 4), b"same size": (1, 4, 4), b"wide": (1, 2, 8), b"large": (1, 4, 8)}
PIECES = st.lists(st.sampled_from(["a", "b", *GRIDS]), min_size=1, max_size=5)
SHAPES = st.lists(st.tuples(PIECES, st.text("xyi", min_size=1, max_size=4), st.sampled_from([1.0, 0.5])), min_size=1)


def sequence(pieces: Sequence[str | bytes], response: str = "x", temperature: float = 1.0) -> MergedSequence:
    """Text `a` and `b` of three tokens, images, and a response in which `i` is the token that stands for images."""
    tokens: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            t, h, w = GRIDS[piece]
            tokens += [IMAGE] * (t * h * w // 4)
        else:
            tokens += [ord(piece)] * 3
    images = tuple(piece for piece in pieces if isinstance(piece, bytes))
    answer = [IMAGE if letter == "i" else ord(letter) for letter in response]
    grids = np.array([GRIDS[image] for image in images], np.int32).reshape(-1, 3)
    made = step(
        np.array(tokens, np.int32), np.array(answer, np.int32), images=images, grids=grids, temperature=temperature
    )
    return unmerged_sequence(made)


def grow(sequences: Sequence[MergedSequence], minimum: int = 1) -> PrefixTree:
    return build_prefix_tree(sequences, (IMAGE, VIDEO), IMAGE, 2, minimum)


def units(each: MergedSequence) -> list[tuple[object, ...]]:
    """What each token is, in a form that another implementation of the comparison can use: tokens and images."""
    images = iter(zip(each.images, map(tuple, each.grids.tolist()), strict=True))
    answers, result, left = set(each.response_positions.tolist()), [], 0
    image: object = None
    for position, token in enumerate(each.tokens.tolist()):
        if token == IMAGE and position not in answers:
            if not left:
                image = next(images)
                left = int(np.prod(image[1])) // 4
            result.append((each.temperature, image, left))
            left -= 1
        else:
            result.append((each.temperature, token, token == IMAGE and position in answers))
    return result


def shared(one: MergedSequence, other: MergedSequence) -> int:
    """Units that two sequences have in common at their beginning."""
    pairs = list(zip(units(one), units(other), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def packed_tokens(tree: PrefixTree, sequences: Sequence[MergedSequence]) -> np.ndarray:
    return np.concatenate([sequences[s.sequence].tokens[s.start : s.stop] for s in tree.segments])


@given(SHAPES, st.integers(1, 8))
def test_every_sequence_is_a_path_of_its_own_tokens(shapes: list[tuple], minimum: int) -> None:
    sequences = [sequence(*shape) for shape in shapes]
    tree = grow(sequences, minimum)
    tokens = packed_tokens(tree, sequences)
    assert len(tokens) == tree.tokens <= sum(each.length for each in sequences)
    for index, each in enumerate(sequences):
        assert np.array_equal(tokens[tree.token_positions(index, each.length)], each.tokens)
        path = [tree.segments[segment] for segment in tree.path(index)]
        assert [s.start for s in path] == [0, *(s.stop for s in path[:-1])]
        assert path[-1].stop == each.length
        for segment in path:
            assert units(sequences[segment.sequence])[: segment.stop] == units(each)[: segment.stop]


@given(SHAPES, st.integers(1, 8))
def test_what_sequences_share_is_computed_once_unless_it_is_short(shapes: list[tuple], minimum: int) -> None:
    sequences = [sequence(*shape) for shape in shapes]
    tree = grow(sequences, minimum)
    users = [{i for i in range(len(sequences)) if segment in tree.path(i)} for segment in range(len(tree.segments))]
    assert all(s.length >= minimum for s, used in zip(tree.segments, users, strict=True) if len(used) > 1)
    for one, other in combinations(range(len(sequences)), 2):
        both = set(tree.path(one)) & set(tree.path(other))
        computed_once = sum(tree.segments[segment].length for segment in both)
        assert shared(sequences[one], sequences[other]) - minimum < computed_once
        assert computed_once <= shared(sequences[one], sequences[other])


@given(SHAPES, st.data())
def test_a_part_of_a_tree_computes_what_its_sequences_had(shapes: list[tuple], data: st.DataObject) -> None:
    sequences = [sequence(*shape) for shape in shapes]
    tree = grow(sequences, 3)
    chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1), unique=True, min_size=1))
    part, few = restrict_to(tree, chosen), [sequences[i] for i in chosen]
    assert part.tokens == sum(tree.segments[s].length for s in {s for i in chosen for s in tree.path(i)})
    tokens = packed_tokens(part, few)
    for index, each in enumerate(few):
        assert np.array_equal(tokens[part.token_positions(index, each.length)], each.tokens)
    children = [s.parent for s in part.segments if s.parent != NO_PARENT]
    assert all(children.count(parent) > 1 for parent in children)  # no segment has a single child
    assert all(parent < index for index, parent in enumerate(part.parents.tolist()))


def test_an_image_is_shared_as_a_whole_or_not_at_all() -> None:
    first = sequence(["a", b"small", "b"])
    wide = replace(sequence(["a", b"small", "b"], "y").samples[0], grids=np.array([GRIDS[b"wide"]], np.int32))
    assert grow([first, unmerged_sequence(wide)]).segments[0].length == 3  # equal bytes in another grid
    # Equal images in a row, of which the other sequence has fewer.
    assert grow([sequence([b"small", b"small"], "x"), sequence([b"small", b"wide"], "x")]).segments[0].length == 4


def test_a_placeholder_in_a_response_is_text_and_none_elsewhere() -> None:
    assert grow([sequence(["a"], "xi"), sequence(["a"], "xiy")]).tokens == 3 + 2 + 1
    tokens, grids = np.array([97, 97, 97, 120, *[IMAGE] * 4], np.int32), np.array([GRIDS[b"small"]], np.int32)
    prompt = replace(sequence(["a"]).samples[0], prompt=tokens, images=(b"small",), grids=grids)
    assert grow([sequence(["a"], "xi"), unmerged_sequence(prompt)]).segments[0].length == 4

    broken = replace(sequence(["a", b"small"]).samples[0], images=(), grids=np.zeros((0, 3), np.int32))
    with pytest.raises(ValueError, match=r"4 placeholders \(token 500\) for 0 image tokens"):
        grow([unmerged_sequence(broken)])


def family(count: int, common: int, own: int, ticket: int) -> list[MergedSequence]:
    """Sequences that have `common` tokens in common and `own` of their own, a tenth of them the response."""
    prefix = np.full(common, ticket, np.int32)
    made = []
    for index in range(count):
        rest = random_tokens(1000 * ticket + index, own)
        rest[0] = 1000 + index
        answer = max(1, own // 10)
        made.append(unmerged_sequence(step(np.append(prefix, rest[:-answer]), rest[-answer:], trajectory=(ticket, 0))))
    return made


def text_cost(tree: PrefixTree, sequences: Sequence[MergedSequence]) -> float:
    """Operations by hand: each token, each pair of a token and one that it sees, each scored token."""
    pairs = sum(s.start + i + 1 for s in tree.segments for i in range(s.length))
    scored = sum(len(each.response_positions) for each in sequences)
    return tree.tokens * COST.per_token + pairs * COST.per_token_pair + scored * COST.per_scored_token


def test_the_cost_of_a_trees_segments_counts_each_token_once() -> None:
    sequences = family(3, 200, 50, ticket=1)
    tree = grow(sequences, 64)
    found = sum(COST.segment_flops(s.start, s.stop) for s in tree.segments) + sum(map(COST.scoring_flops, sequences))
    assert found == pytest.approx(text_cost(tree, sequences))
    assert tree.tokens == 350
    alone = grow(sequences[:1], 64)
    whole = COST.segment_flops(0, sequences[0].length) + COST.scoring_flops(sequences[0])
    assert whole == pytest.approx(text_cost(alone, sequences[:1]))


def test_families_are_kept_together_and_a_long_prefix_is_not_copied_without_limit() -> None:
    sequences = family(8, 600, 100, ticket=1)  # 5600 tokens, 1400 with the prefix once
    assert len(pack_sequences(sequences, COST, 1400, tree=grow(sequences, 64))[0]) == 1
    assert len(pack_sequences(sequences, COST, 1400)[0]) == 4
    groups = [family(8, 600, 200, ticket) for ticket in range(6)]
    sequences = [each for group in zip(*groups, strict=True) for each in group]
    tree = grow(sequences, 64)
    bins = pack_sequences(sequences, COST, 2400, tree=tree)[0]
    computed = sum(restrict_to(tree, each).tokens for each in bins)
    assert tree.tokens == 6 * (600 + 8 * 200)
    assert computed <= 1.15 * tree.tokens
    sequences = family(100, 900, 5, ticket=1)
    bins = pack_sequences(sequences, COST, 1400, tree=grow(sequences, 64))[0]
    assert max(map(len, bins)) == MAX_SEQUENCE_TOKENS_RATIO * 1400 // 905


# Swaps into bins that lack room for the tokens of whole sequences only.
@example([(9, 159, 2), *((1, 0, own) for own in (260, 270, 109, 146, 111, 223, 137, 119))], 400, 1, 1)
@example([(8, 177, 3), (9, 189, 3), *((1, 0, own) for own in (245, 82, 133, 173, 129, 125, 219))], 400, 1, 1)
@example([(8, 184, 2), *((1, 0, own) for own in (89, 90, 278, 64, 130, 150, 187, 250))], 400, 1, 1)
@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 500), st.integers(2, 300)), min_size=1, max_size=8),
    st.integers(800, 2000), st.integers(1, 4), st.integers(1, 3),
)  # fmt: skip
def test_microbatches_of_a_tree_respect_the_limits(
    shapes: list[tuple[int, int, int]], limit: int, replicas: int, multiple: int
) -> None:
    sequences = [each for ticket, shape in enumerate(shapes) for each in family(*shape, ticket)]
    tree = grow(sequences, 64)
    parts = pack_sequences(sequences, COST, limit, replicas, multiple, tree=tree)
    bins = [each for part in parts for each in part]
    assert sorted(i for each in bins for i in each) == list(range(len(sequences)))
    assert all(restrict_to(tree, each).tokens <= limit for each in bins if each)
    assert all(sum(sequences[i].length for i in each) <= MAX_SEQUENCE_TOKENS_RATIO * limit for each in bins)
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % multiple == 0
