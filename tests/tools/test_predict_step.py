"""`tools.predict_step --measure`: what it predicts, what it measures of a small model, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language.rope import make_rotation
from megatron_webrl.model.vision_language.swiglu import swiglu
from megatron_webrl.placement import hardware
from megatron_webrl.placement.performance.shapes import ModelShape
from megatron_webrl.trainer.data.flops import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from tests.trainer.growing_prompts import episode, random_tokens, step
from tools import predict_step
from tools.cpu_prediction import comparison, rates


def test_a_packed_tree_has_the_operations_that_the_trainer_counts(tiny_model: Path) -> None:
    processor, cost = Processor.load(tiny_model), FlopsEstimator.from_hf_config(load_hf_config(tiny_model))
    start = random_tokens(0, 90)
    branches = [step(np.concatenate([start, random_tokens(seed, 20 * seed)]), random_tokens(9, 7)) for seed in (1, 2)]
    samples = [*branches, *episode(processor, 0, (6, 2))]
    packer = SequencePacker(processor, 4000, torch.device("cpu"), 0, 1, cost)
    [batch] = packer.build(samples, "token_mean", 1)
    assert (batch.inputs.parents >= 0).any()
    model = ModelShape.from_description(read_model_config(str(tiny_model)))
    assert model.useful(rates.packed_shape(batch.inputs)) == pytest.approx(3 * batch.operations, rel=1e-6)


class MovedValues(TorchDispatchMode):
    """Counts the values that kernels read and write; views move none, and what is only written counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::_unsafe_view", "aten::detach", "aten::empty_like"):
            inputs = {name: value for name, value in (kwargs or {}).items() if name not in ("out", "grad_input")}
            self.values += sum(
                x.numel() for x in tree_flatten((args, inputs, result))[0] if isinstance(x, torch.Tensor)
            )
        return result


def _rotary_embedding() -> Any:
    """Of sixteen heads, so that cosines and sines, which they share, count little."""
    rotate = make_rotation(torch.randn(512, 1, 1, 8), torch.float32, fused=False)
    return lambda rows: rotate(rows.view(512, 1, 16, 8))


@pytest.mark.parametrize(
    ("module", "width", "moved"),
    [
        (rates.make_norm(128), 128, hardware.RMS_NORM),
        (torch.nn.LayerNorm(128), 128, hardware.LAYER_NORM),
        (swiglu, 256, hardware.SWIGLU * 0.5),  # of half of its input's width
        (_rotary_embedding(), 128, hardware.ROTARY),
        (torch.nn.GELU("tanh"), 128, hardware.GELU),
    ],
    ids=["RMSNorm", "LayerNorm", "SwiGLU", "rotary embedding", "GELU"],
)
def test_counts_of_moved_values_are_those_of_the_kernels(module: Any, width: int, moved: hardware.Moved) -> None:
    rows = torch.randn(512, width, requires_grad=True)
    with MovedValues() as forward:
        output = module(rows)
    gradient = torch.randn_like(output)
    with MovedValues() as backward:
        output.backward(gradient)
    assert forward.values == pytest.approx(moved.forward * rows.numel(), rel=0.05)
    assert backward.values == pytest.approx(moved.backward * rows.numel(), rel=0.05)


def test_a_step_of_the_benchmark_is_predicted_and_measured_part_by_part() -> None:
    small = ["--hidden", "64", "--layers", "2", "--episodes", "1", "--vocabulary", "1024", "--threads", "1"]
    found = comparison.compare_with_benchmark(small, rounds=1)
    parts = ["products", "attention", "vision", "output layer", "other kernels", "gradients and weights"]
    assert sorted(found.parts) == sorted([*parts, "between operations", "optimizer", "packing, images"])
    assert all(found.parts[name].predicted > 0 for name in parts)
    assert all(found.parts[name].measured > 0 for name in parts)
    assert sum(each.measured for each in found.parts.values()) == pytest.approx(found.total.measured, rel=1e-6)
    assert 1 / 3 < found.total.ratio < 3  # CPU seconds, which other work changes less than this
    assert all(1e6 < rate < 1e13 for name, rate in vars(found.rates).items() if name != "launch_seconds")


@pytest.mark.parametrize("words", [["--config-name", "8b_1node"], ["--search"], ["--card", "H100"], ["--steps", "3"]])
def test_a_measurement_refuses_the_options_of_predictions(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_step.main(["--measure", *words]) == 2
    assert "give it no other option than --json" in capsys.readouterr().err


def test_a_prediction_needs_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_step.main([]) == 2
    assert "--config-name says which configuration to predict" in capsys.readouterr().err
