"""Prefix merging of steps; each step keeps the tokens it was conditioned on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.prefix_merging import merge_prefixes
from tests.trainer.growing_prompts import random_tokens, step

IMAGE, VIDEO = 500, 501
PLACEHOLDERS = (IMAGE, VIDEO)
GRID = [1, 4, 4]


def grown(lengths: list[int], **options: object) -> list[TrainingSample]:
    """Text steps; each prompt is the previous prompt, its response and some words."""
    samples: list[TrainingSample] = []
    prompt = random_tokens(99, 6)
    for number, length in enumerate(lengths):
        samples.append(step(prompt, random_tokens(number, length), first=100 * number, **options))  # type: ignore[arg-type]
        prompt = np.concatenate([prompt, samples[-1].response, random_tokens(50 + number, 3)])
    return samples


def seen(count: int, *, last: bytes = b"", grid: list[int] = GRID) -> TrainingSample:
    """A step with `count` images, which extends the step with one image fewer."""
    parts = [random_tokens(0, 4)]
    for number in range(count):
        parts += [np.full(4, IMAGE, np.int32), random_tokens(number, 2), random_tokens(100 + number, 3)]
    images = [b"image %d" % number for number in range(count)]
    images[0] = last or images[0]
    return step(
        np.concatenate(parts[:-1]), parts[-1], images=tuple(images), grids=np.array([grid] + [GRID] * (count - 1))
    )


def sizes(samples: list[TrainingSample]) -> list[int]:
    return sorted(len(chain.samples) for chain in merge_prefixes(samples, PLACEHOLDERS))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_steps_that_extend_each_other_become_one_sequence_in_any_order(lengths: list[int], random) -> None:
    samples = grown(lengths)
    shuffled = random.sample(samples, len(samples))
    (chain,) = merge_prefixes(shuffled, PLACEHOLDERS)
    assert [id(s) for s in chain.samples] == [id(s) for s in samples]
    assert chain.length == samples[-1].length
    assert np.array_equal(chain.tokens[chain.response_positions], np.concatenate([s.response for s in samples]))
    assert (np.diff(chain.response_positions) > 0).all()
    for sample, end in zip(samples, np.cumsum(lengths), strict=True):  # what stands before each response
        start = chain.response_positions[end - len(sample.response)]
        assert np.array_equal(chain.tokens[:start], sample.prompt)


def test_a_step_joins_the_longest_sequence_that_it_extends() -> None:
    first, second, third = grown([2, 3, 4])
    other = step(first.prompt, np.append(first.response, np.int32(7)))  # the same prompt, another answer
    assert sizes([third, other, second, first]) == [1, 3]
    aside = step(np.concatenate([first.prompt, first.response, random_tokens(9, 2)]), random_tokens(8, 2))
    assert sizes([first, aside, second, third]) == [2, 2]  # two steps extend the first
    later = [replace(s, prompt=np.concatenate([random_tokens(70, 5), s.prompt])) for s in grown([4, 1])]
    assert sizes([first, second, *later]) == [2, 2]  # a broken sequence starts again
    assert sizes([first, step(np.append(first.prompt, first.response[:1]), random_tokens(2, 9))]) == [1, 1]
    assert sizes([first, replace(second, trajectory_id=(0, 1)), third]) == [1, 2]
    assert sizes([first, replace(second, temperature=0.5)]) == [1, 1]
    for token in PLACEHOLDERS:  # no step extends a response with a placeholder
        response = np.array([3, token, 4], np.int32)
        odd = replace(second, response=response)
        after = replace(third, prompt=np.concatenate([odd.prompt, response, random_tokens(1, 3)]))
        assert [each.samples for each in merge_prefixes([first, odd, after], PLACEHOLDERS)] == [(first, odd), (after,)]


def test_images_are_compared_by_content_and_grid() -> None:
    assert sizes([seen(1), seen(2), seen(3)]) == [3]
    (chain,) = merge_prefixes([seen(1), seen(3)], PLACEHOLDERS)
    assert chain.images == seen(3).images
    assert chain.grids.tolist() == [GRID] * 3
    assert sizes([seen(1), seen(2, last=b"another image")]) == [1, 1]
    assert sizes([seen(1), seen(2, grid=[1, 2, 8])]) == [1, 1]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 3)), max_size=12))
def test_each_step_is_in_one_sequence_that_holds_its_tokens(shapes: list[tuple[int, int, int]]) -> None:
    """With a vocabulary of one token, nearly every step extends another one."""
    samples = [
        step(np.ones(prompt, np.int32), np.ones(response, np.int32), trajectory=(ticket, 0), first=10 * number)
        for number, (ticket, prompt, response) in enumerate(shapes)
    ]
    chains = merge_prefixes(samples, PLACEHOLDERS)
    assert sorted(id(s) for chain in chains for s in chain.samples) == sorted(map(id, samples))
    for chain in chains:
        assert len({s.trajectory_id for s in chain.samples}) == 1
        ends = np.cumsum([len(s.response) for s in chain.samples])
        for sample, end in zip(chain.samples, ends, strict=True):
            own = chain.response_positions[end - len(sample.response) : end]
            assert own.tolist() == list(range(len(sample.prompt), sample.length))
