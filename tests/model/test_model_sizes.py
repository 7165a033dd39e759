"""The parameter map has exactly the tensors of every released size."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration

from megatron_webrl.model import model_sizes
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes, check_parallel_sizes
from megatron_webrl.model.parameter_map import parameter_shapes

BILLIONS = {"2B": 2.13, "4B": 4.44, "8B": 8.77, "32B": 33.4, "30B-A3B": 31.1, "235B-A22B": 235.7}
"""Weights, vision tower included."""


def _has_experts(name: str) -> bool:
    return "num_experts" in model_sizes.config_sections(name)["text_config"]


@pytest.mark.parametrize("name", model_sizes.MODEL_SIZES)
def test_the_map_has_every_tensor_of_a_released_size_with_its_shape(name: str) -> None:
    hf_config = model_sizes.make_hf_config(name)
    sparse = _has_experts(name)
    with torch.device("meta"):
        model = (Qwen3VLMoeForConditionalGeneration if sparse else Qwen3VLForConditionalGeneration)(hf_config)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if hf_config.tie_word_embeddings:
        del expected["lm_head.weight"]
    # In memory transformers keeps experts transposed against the released files.
    mappings = parameter_mappings(hf_config, "transposed" if sparse else "released")
    assert {mapping.hf_param: mapping.tensor_shape for mapping in mappings} == expected
    count = sum(torch.Size(shape).numel() for shape in expected.values())
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_all_expert_formats_of_a_released_size_fill_the_same_parameters() -> None:
    hf_config = model_sizes.make_hf_config("30B-A3B")
    wanted = parameter_shapes(parameter_mappings(hf_config, "released"), 4, 2)
    for form in ("transposed", "separate"):
        assert parameter_shapes(parameter_mappings(hf_config, form), 4, 2) == wanted


@pytest.mark.parametrize("name", model_sizes.MODEL_SIZES)
def test_common_parallel_sizes_divide_every_released_size(name: str) -> None:
    experts = 8 if _has_experts(name) else 1
    for tensor in (1, 2, 4):
        check_parallel_sizes(
            model_sizes.make_hf_config(name).text_config, ParallelSizes(tensor=tensor, pipeline=8, expert=experts)
        )
