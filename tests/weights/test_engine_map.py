"""The engine map, against the parameters of real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_webrl.model import parameter_counts
from megatron_webrl.util import torchvision_shim
from megatron_webrl.weights.engine_map import EngineSizes, check_engine_sizes, engine_parameter_shapes, stage_layers
from tests.model import tiny
from tests.model.qwen3_5 import small
from tools.make_tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
QWEN3_5 = {"architecture": "qwen3_5", "dtype": "bfloat16"}
SECONDS = 600.0  # for one engine to start and answer


def engine_shapes(folder: Path, sizes: EngineSizes) -> dict[int, dict[str, tuple[int, ...]]]:
    """Loading-form shapes in each worker of a real engine, by rank. The engine's processes end with this call."""
    arguments = {
        "tensor_parallel_size": sizes.tensor,
        "pipeline_parallel_size": sizes.pipeline,
        "enable_expert_parallel": sizes.expert_parallel,
        "mm_encoder_tp_mode": "data",
    }
    report = folder.parent / "shapes.json"
    path = os.pathsep.join([str(torchvision_shim.SITECUSTOMIZE_FOLDER), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.weights.engine_shapes_process", str(folder), json.dumps(arguments), str(report)],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        process.wait(SECONDS)
    finally:
        # The engine's workers are in the same session.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0
    workers = json.loads(report.read_text())
    return {int(rank): {name: tuple(shape) for name, shape in shapes.items()} for rank, shapes in workers.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param({}, EngineSizes(pipeline=2), marks=pytest.mark.soak),
        ({"kv_heads": 1, "tie": False}, EngineSizes(tensor=2)),
        ({"experts": 4}, EngineSizes(pipeline=2)),
        pytest.param({"experts": 3, "tie": False}, EngineSizes(tensor=2), marks=pytest.mark.soak),
        pytest.param({"experts": 3, "tie": False}, EngineSizes(tensor=2, expert_parallel=True), marks=pytest.mark.soak),
        (QWEN3_5 | {"experts": 4, "tie": False}, EngineSizes(tensor=2)),
        pytest.param(QWEN3_5 | {"layers": 8}, EngineSizes(pipeline=2), marks=pytest.mark.soak),
        pytest.param(QWEN3_5 | {"tie": False, "kv_heads": 1}, EngineSizes(tensor=2), marks=pytest.mark.soak),
    ],
    ids=[
        "dense, two stages", "dense, key head on both ranks", "sparse, two stages", "sparse", "whole experts",
        "hybrid, sparse", "hybrid, two stages", "hybrid, key head on both ranks",
    ],
)  # fmt: skip
def test_the_map_equals_the_parameters_of_a_real_engine(
    tmp_path: Path, model: dict[str, Any], sizes: EngineSizes
) -> None:
    folder = make_tiny_model(tmp_path / "model", **model)
    hf_config = AutoConfig.from_pretrained(folder)
    check_engine_sizes(hf_config, sizes)
    shapes = engine_shapes(folder, sizes)
    assert shapes == {rank: engine_parameter_shapes(hf_config, sizes, rank) for rank in range(sizes.ranks)}


@pytest.mark.parametrize("layers", [2, 5, 28, 94])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_stages_have_the_layers_that_vllm_assigns(layers: int, stages: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    if stages <= layers:
        wanted = tuple(range(*get_pp_indices(layers, stage, stages)) for stage in range(stages))
        assert stage_layers(layers, stages) == wanted


def _has_experts(name: str) -> bool:
    return "num_experts" in parameter_counts.config_sections(name)["text_config"]


@pytest.mark.parametrize("name", parameter_counts.MODEL_SIZES)
def test_the_ranks_of_an_engine_hold_a_released_model_once(name: str) -> None:
    hf_config = parameter_counts.make_hf_config(name)
    whole = engine_parameter_shapes(hf_config, EngineSizes(), 0)
    for sizes in (
        EngineSizes(4),
        EngineSizes(4, expert_parallel=_has_experts(name)),
    ):
        check_engine_sizes(hf_config, sizes)
        parts = [engine_parameter_shapes(hf_config, sizes, rank) for rank in range(4)]
        for parameter, shape in whole.items():
            shapes = {part[parameter] for part in parts}
            assert len(shapes) == 1, parameter
            split = [one for one, of in zip(shapes.pop(), shape, strict=True) if one != of]
            assert len(split) <= 1, parameter
            assert not (split and parameter.startswith("visual.")), parameter


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        (tiny.Shape(), EngineSizes(tensor=0), "engine tensor=0 is less than 1"),
        (tiny.Shape(), EngineSizes(tensor=3), r"tensor_parallel=3 does not divide num_attention_heads=4 \(engine\)"),
        (tiny.Shape(key_value_heads=4), EngineSizes(tensor=8), "tensor_parallel=8 does not divide num_attention_heads"),
        (tiny.Shape(), EngineSizes(pipeline=5), "engine pipeline=5 exceeds 4 layers"),
        (tiny.Shape(deepstack=(0, 1)), EngineSizes(pipeline=4), "fewer than the 2 layers that DeepStack feeds"),
        (tiny.Shape(), EngineSizes(expert_parallel=True), "needs a mixture of experts"),
        (tiny.Shape(experts=3), EngineSizes(tensor=4), "engine tensor=4 exceeds num_experts=3"),
    ],
)
def test_sizes_that_vllm_cannot_shard_are_refused(shape: tiny.Shape, sizes: EngineSizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine_sizes(tiny.configuration(shape), sizes)


def test_a_stage_without_full_attention_is_refused() -> None:
    hf_config = small.configuration(small.Shape(layers=(small.LINEAR, small.FULL, small.LINEAR, small.LINEAR)))
    check_engine_sizes(hf_config, EngineSizes(tensor=2))
    with pytest.raises(ValueError, match="engine pipeline=2 leaves stage 1 only layers of linear attention"):
        check_engine_sizes(hf_config, EngineSizes(pipeline=2))
