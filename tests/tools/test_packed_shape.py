"""The shape of a packed micro-batch, from which the host benchmark predicts the device's seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.placement.model_shape import ModelShape
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from tests.trainer.growing_prompts import episode, random_tokens, step
from tools.bench.host.measures import packed_shape


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
