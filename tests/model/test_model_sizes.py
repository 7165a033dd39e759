"""The parameter map has exactly the tensors of every released size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_webrl.model import parameter_counts
from megatron_webrl.model.architectures import parameter_mappings

BILLIONS = {"2B": 2.13, "4B": 4.44, "8B": 8.77, "32B": 33.4, "30B-A3B": 31.1, "235B-A22B": 235.7}
"""Weights of Qwen3-VL, vision tower included."""
STORED = {
    "Qwen3.5-4B": 4_659_865_088,
    "Qwen3.5-9B": 9_653_104_368,
    "Qwen3.5-27B": 27_781_427_952,
    "Qwen3.5-35B-A3B": 35_951_822_704,
    "Qwen3.5-122B-A10B": 125_086_497_008,
}
"""Elements of the released folders of Qwen3.5 (metadata of their files on the Hub), with the layer `mtp.*`."""


@pytest.mark.parametrize("name", parameter_counts.RELEASED)
def test_the_map_has_every_tensor_of_a_released_size_with_its_shape(name: str) -> None:
    hf_config = parameter_counts.make_hf_config(name)
    sparse = bool(getattr(hf_config.text_config, "num_experts", 0))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(hf_config)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if hf_config.tie_word_embeddings:
        del expected["lm_head.weight"]
    # In memory transformers keeps experts transposed against the released files.
    mappings = parameter_mappings(hf_config, "transposed" if sparse else "released")
    assert {mapping.hf_param: mapping.tensor_shape for mapping in mappings} == expected
    count = sum(torch.Size(shape).numel() for shape in expected.values())
    if name in BILLIONS:
        assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    else:
        assert count + _multi_token_prediction(hf_config.text_config) == STORED[name]


def _multi_token_prediction(text: Any) -> int:
    """Elements of a layer of full attention, of four norms and of the projection of two hidden states to one."""
    hidden, dim = text.hidden_size, text.head_dim
    attention = hidden * dim * (3 * text.num_attention_heads + 2 * text.num_key_value_heads) + 2 * dim
    inner = getattr(text, "intermediate_size", 0)
    mlp = 3 * hidden * inner
    if getattr(text, "num_experts", 0):
        experts = text.num_experts * (3 * text.moe_intermediate_size + 1)
        mlp = hidden * (experts + 3 * text.shared_expert_intermediate_size + 1)
    return attention + mlp + 2 * hidden**2 + 5 * hidden


def test_a_folder_name_means_a_released_size() -> None:
    for path, size in {
        "models/Qwen3-VL-8B-Instruct": "8B",
        "/data/Qwen3-VL-4B-Thinking/": "4B",
        "models/Qwen3.5-4B": "Qwen3.5-4B",
        "Qwen3.5-35B-A3B-Base": "Qwen3.5-35B-A3B",
        "models/Qwen3.5-5B": None,
        "models/Qwen3-VL-9B": None,
    }.items():
        assert parameter_counts.size_from_path(path) == size
