"""Advantages of steps on their way into a batch: samples, merged and packed sequences, and the shuffled control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.credit.advantages import step_advantages
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker
from megatron_webrl.types import Group, Trajectory
from tests.trainer.credit.made_groups import plain_group

MERGES = ("none", "trajectory", "all")


def build(
    folder: Path, samples: list[batching.TrainingSample], merge: str = "all", max_tokens: int = 60, replicas: int = 2
) -> list[Microbatch]:
    cost = FlopsEstimator.from_hf_config(load_hf_config(folder))
    packers = [
        SequencePacker(Processor.load(folder), max_tokens, torch.device("cpu"), rank, replicas, cost,
                       merge_prefixes=merge)
        for rank in range(replicas)
    ]  # fmt: skip
    return [batch for packer in packers for batch in packer.build(samples, "token_mean", 10)]


def growing_episode(plain: Trajectory) -> Trajectory:
    """The episode with prompts that extend each other, and behaviour log-probabilities that identify each token.

    The step in the middle has no response tokens.
    """
    steps, prompt = [], np.arange(20, 25, dtype=np.int32)
    for number, step in enumerate(plain.steps):
        length = 0 if number == 1 and len(plain.steps) > 2 else 2 + number
        response = np.arange(100, 100 + length, dtype=np.int32)
        names = 1000 * plain.index + 10 * number + np.arange(length, dtype=np.float32)
        steps.append(
            replace(step, prompt_token_ids=prompt, response_token_ids=response, logprobs=names,
                    versions=np.zeros(length, np.int32))
        )  # fmt: skip
        prompt = np.concatenate([prompt, response, np.arange(30, 33, dtype=np.int32)])
    return replace(plain, steps=tuple(steps))


def test_each_response_token_has_the_advantage_of_its_step(tiny_model: Path) -> None:
    plain = plain_group([True, False, True], [4, 2, 3])
    group = Group(0, tuple(growing_episode(each) for each in plain.trajectories))
    config = Config()
    config.trainer.advantage.discount = 0.5
    (advantages,) = step_advantages([group], config)
    wanted = {
        name: float(advantages[t.index][number])
        for t in group.trajectories
        for number, step in enumerate(t.steps)
        for name in step.logprobs.tolist()
    }
    assert len({round(value, 9) for value in wanted.values()}) == 5  # of the steps left from 0 to 3, and of the failure
    for merge in MERGES:
        batches = build(tiny_model, batching.training_samples([group], config, 0), merge, 400, 1)
        found = dict(
            pair for b in batches for pair in zip(b.behaviour_logprobs.tolist(), b.advantage.tolist(), strict=True)
        )
        assert found == pytest.approx(wanted, rel=1e-6), merge


def test_a_step_is_valued_at_the_last_token_of_its_prompt(tiny_model: Path) -> None:
    group = Group(0, tuple(growing_episode(each) for each in plain_group([True, False, True], [4, 2, 3]).trajectories))
    samples = batching.training_samples([group], Config(), 0)
    by_id = {sample.step_id: sample for sample in samples}
    assert len(by_id) == len(samples) == 7  # two steps have no response
    for merge in MERGES:
        found, weights = [], []
        for batch in build(tiny_model, samples, merge):
            rows = batch.inputs.value_rows
            assert rows is not None
            places = batch.inputs.scored_positions[rows].tolist()
            for row, place in zip(rows.tolist(), places, strict=True):
                sample = by_id[batch.step_ids[int(batch.step_index[row])]]
                assert batch.behaviour_logprobs[row] == sample.behaviour_logprobs[0]
                prompt = batch.inputs.tokens[place + 1 - len(sample.prompt) : place + 1]
                assert prompt.tolist() == sample.prompt.tolist(), merge
                found.append(sample.step_id)
            weights += batch.value_weight.tolist()
        assert sorted(found) == sorted(by_id), merge
        assert weights == pytest.approx([1 / 7] * 7)
    batches = build(tiny_model, batching.training_samples([plain_group([True], [1])], Config(), 0))
    assert sorted(batch.value_weight.tolist() for batch in batches) == [[0.0], [1.0]]  # one is padding


def test_shuffled_advantages_are_dealt_to_whole_trajectories_in_their_order_by_seed_and_version() -> None:
    groups = [plain_group([True, False], [6, 2], ticket=t) for t in range(2)]
    groups.append(plain_group([True, False], [3, 4], ticket=2))
    config = Config()
    config.trainer.advantage.discount = 0.5
    plain = batching.training_samples(groups, config, 0)
    before, dealt = by_trajectory(plain), list[dict[tuple[int, int], list[float]]]()
    config.trainer.loss.shuffle_advantages = True
    for config.run.seed, version in ((0, 0), (0, 0), (0, 1), (0, 2), (1, 0)):
        shuffled = batching.training_samples(groups, config, version)
        assert [s.trajectory_id for s in shuffled] == [s.trajectory_id for s in plain]
        assert [s.prompt.tolist() for s in shuffled] == [s.prompt.tolist() for s in plain]
        dealt.append(by_trajectory(shuffled))
        unused = list(before.values())
        for given in dealt[-1].values():
            donor = [each for each in unused if given == [each[k * len(each) // len(given)] for k in range(len(given))]]
            unused.remove(donor[0])
        assert not unused
    assert dealt[0] == dealt[1]
    assert len({str(each) for each in [*dealt, before]}) >= 4
    assert batching.shuffled_rewards(groups, config, 0) == groups  # that is for imitation


def by_trajectory(samples: list[batching.TrainingSample]) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        found.setdefault(sample.trajectory_id, []).append(sample.advantage)
    return found
