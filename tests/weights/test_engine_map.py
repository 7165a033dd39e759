"""The engine map, against the parameters of real engines.

Run as a process with a model's folder, an engine's sizes and the file of its report, it writes the engine's shapes.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.weights.engine_map import (
    EngineMap,
    EngineSizes,
    check_engine_sizes,
    engine_parameter_shapes,
    stage_layers,
)
from tests.model import tiny
from tests.model.qwen3_5 import small
from tests.weights.test_vllm_target import run
from tools.make_tiny_model import make_tiny_model

QWEN3_5 = {"architecture": "qwen3_5", "dtype": "bfloat16"}


def loading_shapes(worker: Any) -> tuple[int, dict[str, tuple[int, ...]]]:
    """A worker's rank, and the loading form's shape of each of its parameters."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    model = worker.model_runner.get_model()
    found, seen = {}, set()
    for prefix, module in model.named_modules():
        info = LAYERWISE_INFO.get(module)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            loading = info.restore_metadata[0].get(name) if info else None
            found[f"{prefix}.{name}"] = tuple((parameter if loading is None else loading).shape)
    return worker.rank, found


def main(folder: str, sizes: str, report: Path) -> None:
    from vllm import LLM

    engine = LLM(
        model=folder,
        enforce_eager=True,
        kv_cache_memory_bytes=32 * 2**20,
        max_model_len=1024,
        limit_mm_per_prompt={"image": 1, "video": 0},
        mm_encoder_tp_mode="data",
        **json.loads(sizes),
    )
    report.write_text(json.dumps(dict(engine.llm_engine.collective_rpc(loading_shapes))))
    engine.llm_engine.engine_core.shutdown()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ({"experts": 4}, EngineSizes(pipeline=2)),
        (QWEN3_5 | {"experts": 4, "tie": False, "kv_heads": 1}, EngineSizes(tensor=2)),
        pytest.param({"experts": 3, "tie": False}, EngineSizes(tensor=2, expert_parallel=True), marks=pytest.mark.soak),
        pytest.param(QWEN3_5 | {"layers": 8}, EngineSizes(pipeline=2), marks=pytest.mark.soak),
    ],
    ids=["sparse, two stages", "hybrid, sparse, key head on both ranks", "whole experts", "hybrid, two stages"],
)
def test_the_map_equals_the_parameters_of_a_real_engine(
    tmp_path: Path, model: dict[str, Any], sizes: EngineSizes
) -> None:
    folder = make_tiny_model(tmp_path / "model", **model)
    hf_config = AutoConfig.from_pretrained(folder)
    check_engine_sizes(hf_config, sizes)
    arguments = {
        "tensor_parallel_size": sizes.tensor,
        "pipeline_parallel_size": sizes.pipeline,
        "enable_expert_parallel": sizes.expert_parallel,
    }
    workers = run(__name__, folder, json.dumps(arguments), tmp_path / "shapes.json")
    found = {int(rank): {name: tuple(shape) for name, shape in shapes.items()} for rank, shapes in workers.items()}
    assert found == {rank: engine_parameter_shapes(hf_config, sizes, rank) for rank in range(sizes.ranks)}


def test_stages_have_the_layers_that_vllm_and_the_trainer_assign() -> None:
    from vllm.distributed.utils import get_pp_indices

    for layers, stages in itertools.product((5, 28, 94), (1, 2, 4, 8)):
        if stages <= layers:
            wanted = tuple(range(*get_pp_indices(layers, stage, stages)) for stage in range(stages))
            assert stage_layers(layers, stages) == wanted
    assert [*map(len, split_layers(94, 4))] == [23, 24, 24, 23]


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        (tiny.Shape(), EngineSizes(tensor=0), "engine tensor=0"),
        (tiny.Shape(), EngineSizes(tensor=3), r"tensor_parallel=3 .*num_attention_heads=4 \(engine\)"),
        (tiny.Shape(), EngineSizes(pipeline=5), "engine pipeline=5 .*4 layers"),
        (tiny.Shape(deepstack=(0, 1)), EngineSizes(pipeline=4), "2 layers that DeepStack"),
        (tiny.Shape(), EngineSizes(expert_parallel=True), "expert_parallel=True"),
        (tiny.Shape(experts=3), EngineSizes(tensor=4), "engine tensor=4 .*num_experts=3"),
        (tiny.Shape(layers=tiny.QWEN3_5_LAYERS), EngineSizes(tensor=4), "tensor_parallel=4 .*linear_num_key_heads=2"),
    ],
)
def test_sizes_that_vllm_cannot_shard_are_refused(shape: tiny.Shape, sizes: EngineSizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine_sizes(tiny.configuration(shape), sizes)


def test_a_stage_without_full_attention_is_refused() -> None:
    hf_config = small.configuration(small.Shape(layers=(small.LINEAR, small.FULL, small.LINEAR, small.LINEAR)))
    check_engine_sizes(hf_config, EngineSizes(tensor=2))
    with pytest.raises(ValueError, match=r"engine pipeline=2 .*stage 1 .*linear attention"):
        check_engine_sizes(hf_config, EngineSizes(pipeline=2))


def test_each_expert_is_on_one_rank_also_where_ranks_have_different_numbers() -> None:
    hf_config = tiny.configuration(tiny.Shape(experts=6))
    engine = EngineMap(hf_config, EngineSizes(tensor=4, expert_parallel=True))
    experts = [mapping for mapping in parameter_mappings(hf_config) if mapping.expert is not None]
    found = [{each.expert for each in experts if engine.shards_of(each, rank)} for rank in range(4)]
    assert found == [{0, 1}, {2, 3}, {4}, {5}]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
