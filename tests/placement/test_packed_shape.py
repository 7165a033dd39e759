"""The operations that the placement predicts are those that the trainer counts of a packed micro-batch."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from tests.trainer.growing_prompts import episode, random_tokens, step


def packed_shape(packed: PackedInput) -> MicrobatchShape:
    """The shape of a micro-batch whose sequences may branch: a segment's tokens attend to those of its ancestors."""
    assert packed.parents is not None
    starts, parents = packed.cu_seqlens.tolist(), packed.parents.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    before: list[int] = []  # tokens of the ancestors of each segment; parents come first
    for parent in parents:
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
    alone = MicrobatchShape.of_sequences(lengths, len(packed.scored_positions), packed.grids.tolist())
    pairs = sum(length * earlier for length, earlier in zip(lengths, before, strict=True))
    return dataclasses.replace(alone, pairs=alone.pairs + pairs)


def test_a_packed_tree_has_the_operations_that_the_trainer_counts(tiny_model: Path) -> None:
    processor, cost = Processor.load(tiny_model), FlopsEstimator.from_hf_config(load_hf_config(tiny_model))
    start = random_tokens(0, 90)
    branches = [step(np.concatenate([start, random_tokens(seed, 20 * seed)]), random_tokens(9, 7)) for seed in (1, 2)]
    samples = [*branches, *episode(processor, 0, (6, 2))]
    packer = SequencePacker(processor, 4000, torch.device("cpu"), 0, 1, cost)
    [batch] = packer.build(samples, "token_mean", 1)
    assert (batch.inputs.parents >= 0).any()
    model = ModelShape.from_description(read_model_config(str(tiny_model)))
    assert model.useful(packed_shape(batch.inputs)) == pytest.approx(3 * batch.operations, rel=1e-6)
