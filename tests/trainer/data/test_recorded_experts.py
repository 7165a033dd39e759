"""The engine's experts reach the tokens that they were recorded for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.prefix_merging import sequence_experts, unmerged_sequence
from tests.trainer.data.conftest import Build
from tests.trainer.growing_prompts import episode, random_tokens, step

LAYERS, TOP_K, LOST = 3, 2, np.iinfo(np.uint8).max


def with_experts(sample: TrainingSample, first: int, dtype: type = np.uint8) -> TrainingSample:
    """Expert numbers that name the position of the token, from `first` on."""
    rows = np.arange(first, first + sample.length - 1)[:, None, None] + np.zeros((LAYERS, TOP_K), np.int64)
    return replace(sample, experts=(rows % 200).astype(dtype))


def test_a_merged_token_has_the_experts_of_the_last_step_that_recorded_them(processor: Processor, build: Build) -> None:
    one, two, three = episode(processor, 0, (6, 2, 9))
    one, three = with_experts(one, 0), with_experts(three, 100)
    assert three.experts is not None
    three.experts[4] = three.experts[one.length] = LOST
    (batch,) = build([three, two, one], replays_routing=True)
    found = batch.inputs.experts
    assert found is not None
    assert found.dtype is torch.int16
    assert found.shape == (three.length, LAYERS, TOP_K)
    positions = np.arange(three.length)
    wanted = (100 + positions) % 200
    wanted[4] = 4
    wanted[[one.length, -1]] = NOT_RECORDED  # lost, and the last token, which the engine never computed
    np.testing.assert_array_equal(found[:, 1, 1].numpy(), wanted)
    assert (batch.replayed_tokens, batch.token_count) == (three.length - 2, three.length)


def test_sequences_keep_their_experts_in_a_packed_sequence_and_others_have_none(
    processor: Processor, build: Build
) -> None:
    mine, other = with_experts(episode(processor, 0, (6,))[0], 0, np.uint16), episode(processor, 1, (3,))[0]
    (batch,) = build([other, mine], replays_routing=True)
    found, bounds = batch.inputs.experts, batch.inputs.cu_seqlens.tolist()
    assert found is not None
    assert len(bounds) == 3
    parts = {end - start: found[start:end, 2, 0] for start, end in pairwise(bounds)}
    assert parts[mine.length].tolist() == [*(i % 200 for i in range(mine.length - 1)), NOT_RECORDED]
    assert (parts[other.length] == NOT_RECORDED).all()
    assert batch.replayed_tokens == mine.length - 1


def test_a_common_prefix_has_the_experts_of_the_newest_sequence(build: Build) -> None:
    """Whichever of them comes first, as long as it has experts."""
    prompt = np.arange(30, 130, dtype=np.int32)
    steps = [step(prompt, random_tokens(seed, 5), trajectory=(seed, 0), first=seed) for seed in (1, 3, 2)]
    given = [with_experts(each, 50 * number) for number, each in enumerate(steps)]
    for samples, first in ((given, 50), (given[::-1], 50), ([given[0], steps[1], given[2]], 100)):
        (batch,) = build(samples, replays_routing=True)
        assert batch.inputs.experts is not None
        assert batch.inputs.experts[:100, 0, 0].tolist() == [(first + i) % 200 for i in range(100)]


def test_a_sequence_that_is_a_prefix_of_another_leaves_it_the_rest(build: Build) -> None:
    """Even if it is the newer one: in a part of a tree both may end in one segment."""
    prompt, response = np.arange(30, 130, dtype=np.int32), random_tokens(1, 5)
    one = step(prompt, response, trajectory=(1, 0), first=1)
    two = step(np.concatenate([prompt, response, prompt[:9]]), random_tokens(2, 4), trajectory=(1, 0), first=2)
    newer = step(prompt, response, trajectory=(2, 0), first=3)
    given = [with_experts(one, 0), with_experts(two, 0), with_experts(newer, 100)]
    (batch,) = build(given, replays_routing=True)
    found = batch.inputs.experts
    assert found is not None
    assert len(found) == two.length  # each token once
    assert found[:-1, 0, 0].tolist() == [i % 200 for i in range(two.length - 1)]


def test_without_replay_or_experts_the_router_chooses(processor: Processor, build: Build) -> None:
    plain = episode(processor, 0, (6,))
    for samples, replays in (([with_experts(plain[0], 0)], False), (plain, True)):
        (batch,) = build(samples, replays_routing=replays)
        assert batch.inputs.experts is None
        assert batch.replayed_tokens == 0
    assert sequence_experts(unmerged_sequence(plain[0])) is None
