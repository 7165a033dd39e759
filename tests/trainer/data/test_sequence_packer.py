"""Micro-batches: the tensors of each rank, equal to the engine's inputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.sequence_packer import ImageGridMismatch
from megatron_webrl.trainer.images import ImagePreparationError
from tests.trainer.data.conftest import Build
from tests.trainer.growing_prompts import episode

MERGES = ("none", "trajectory", "all")


def test_scores_of_a_teacher_follow_their_tokens(processor: Processor, build: Build) -> None:
    samples = [*episode(processor, 0, (6, 2, 9)), *episode(processor, 1, (3,))]
    scores = [np.where(s.behaviour_logprobs % 2, s.behaviour_logprobs + 0.5, np.nan) for s in samples[:-1]]
    scored = [replace(s, teacher_logprobs=each) for s, each in zip(samples, scores, strict=False)]
    (batch,) = build([*scored, samples[-1]])
    assert batch.teacher_logprobs is not None
    wanted = [*np.concatenate(scores), *[np.nan] * 3]
    order = np.argsort(np.concatenate([s.behaviour_logprobs for s in samples]), kind="stable")
    found = batch.teacher_logprobs.numpy()[np.argsort(batch.behaviour_logprobs.numpy(), kind="stable")]
    np.testing.assert_array_equal(found, np.array(wanted, np.float32)[order])
    assert build(samples)[0].teacher_logprobs is None


def test_microbatches_of_all_replicas_weigh_each_token_by_the_whole_minibatch(
    processor: Processor, build: Build
) -> None:
    samples = [*episode(processor, 0, (6, 2, 3)), *episode(processor, 1, (3,)), *episode(processor, 2, (5, 4))]
    for normalizer, merge in product(("constant", "per_trajectory", "token_mean"), MERGES):
        wanted = {}
        for sample in samples:
            steps = sum(other.trajectory_id == sample.trajectory_id for other in samples)
            weight = {"constant": 1 / (3 * 10), "per_trajectory": 1 / (3 * steps), "token_mean": 1 / 23}[normalizer]
            wanted |= dict.fromkeys(sample.behaviour_logprobs.tolist(), weight)
        found: Counter[float] = Counter()
        for replica in range(2):
            options = {"max_tokens": 200, "data_parallel_rank": replica, "data_parallel_size": 2}
            for row in build(samples, normalizer, merge_prefixes=merge, **options):
                for token, weight in zip(row.behaviour_logprobs.tolist(), row.weight.tolist(), strict=True):
                    found[token] += weight
        assert dict(found) == pytest.approx(wanted), (normalizer, merge)


def test_a_rank_without_a_vision_tower_decodes_no_image(processor: Processor, build: Build) -> None:
    (sample,) = episode(processor, 0, (4,))
    broken = replace(sample, images=tuple(b"no image" for _ in sample.images))
    (batch,) = build([broken], image_rank=None)
    assert batch.inputs.pixels.shape == (0, processor.pixels([])[0].shape[1])
    assert batch.inputs.local_images is not None
    assert batch.inputs.local_images.numel() == 0
    assert batch.inputs.grids.tolist() == sample.grids.tolist()
    with pytest.raises(ImagePreparationError, match=r"ticket 0, episode 0 .*are no PNG, JPEG or WebP"):
        build([broken])


def test_a_grid_that_differs_from_the_engines_is_refused(processor: Processor, build: Build) -> None:
    (sample,) = episode(processor, 0, (4,), images=1)
    turned = replace(sample, grids=np.array([[1, 2, 8]], np.int32))
    with pytest.raises(ImageGridMismatch, match=r"ticket 0, episode 0: .* \[1, 2, 8\], .* \[1, 4, 4\]"):
        build([turned])


def test_empty_microbatches_are_padded_with_the_shortest_sample_at_weight_zero(
    processor: Processor, build: Build
) -> None:
    samples = [*episode(processor, 0, (6, 2)), *episode(processor, 1, (3,), images=1)]
    parts = [
        build(samples, data_parallel_rank=replica, data_parallel_size=3, microbatch_multiple=2) for replica in range(3)
    ]
    assert [len(part) for part in parts] == [2, 2, 2]
    weightless = [batch for part in parts for batch in part if not batch.weight.any()]
    assert len(weightless) == 4
    assert {batch.inputs.tokens.numel() for batch in weightless} == {samples[2].length}
    assert {batch.token_count for batch in weightless} == {0}
    assert sum(float(batch.weight.sum()) for part in parts for batch in part) == pytest.approx(8 / 4 + 3 / 2)
