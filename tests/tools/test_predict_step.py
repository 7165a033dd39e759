"""`tools.predict_step --measure`: what it predicts for, and what it refuses; the benchmark itself takes minutes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_webrl.cluster.performance.shapes import ModelShape
from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.flops import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from tests.trainer.growing_prompts import episode, random_tokens, step
from tools import cpu_rates, predict_step


def test_a_packed_tree_has_the_operations_that_the_trainer_counts(tiny_model: Path) -> None:
    processor, cost = Processor.load(tiny_model), FlopsEstimator.from_hf_config(load_hf_config(tiny_model))
    start = random_tokens(0, 90)
    branches = [step(np.concatenate([start, random_tokens(seed, 20 * seed)]), random_tokens(9, 7)) for seed in (1, 2)]
    samples = [*branches, *episode(processor, 0, (6, 2))]
    packer = SequencePacker(processor, 4000, torch.device("cpu"), 0, 1, cost)
    [batch] = packer.build(samples, "token_mean", 1)
    assert (batch.inputs.parents >= 0).any()
    model = ModelShape.from_description(read_model_config(str(tiny_model)))
    assert model.useful(cpu_rates.packed_shape(batch.inputs)) == pytest.approx(3 * batch.operations, rel=1e-6)


def test_rates_of_this_cpu_predict_every_part_of_a_pass(tiny_model: Path) -> None:
    processor = Processor.load(tiny_model)
    inputs = cpu_rates.pack(processor, tiny_model, episode(processor, 0, (6, 2, 9)), 2000)
    model = ModelShape.from_description(read_model_config(str(tiny_model)))
    rates = cpu_rates.measure_rates(model, inputs)
    assert 1e6 < rates.attention < 1e13
    assert 1e6 < rates.products < 1e13
    assert 1e6 < rates.memory < 1e13
    parts = cpu_rates.predict_step_seconds(model, rates, inputs)
    assert set(parts) == {"products", "attention", "vision", "output layer", "other kernels", "optimizer"}
    assert all(seconds > 0 for seconds in parts.values())


@pytest.mark.parametrize("words", [["--config-name", "8b_1node"], ["--search"], ["--card", "H100"], ["--steps", "3"]])
def test_a_measurement_refuses_the_options_of_predictions(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_step.main(["--measure", *words]) == 2
    assert "give it no other option than --json" in capsys.readouterr().err


def test_a_prediction_needs_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_step.main([]) == 2
    assert "--config-name says which configuration to predict" in capsys.readouterr().err
