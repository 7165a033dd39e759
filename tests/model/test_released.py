"""The parameter map covers every tensor of every released size, and no other."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration

from megatron_webrl.model import released
from megatron_webrl.model.layout import Sizes, check_sizes
from megatron_webrl.model.parameter_map import model_map, parameter_shapes

BILLIONS = {"2B": 2.13, "4B": 4.44, "8B": 8.77, "32B": 33.4, "30B-A3B": 31.1, "235B-A22B": 235.7}
"""Weights, vision tower included."""


@pytest.mark.parametrize("name", released.SIZES)
def test_the_table_names_every_tensor_of_a_released_size_in_its_shape(name: str) -> None:
    description = released.configuration(name)
    sparse = bool(released.SIZES[name].experts)
    with torch.device("meta"):
        model = (Qwen3VLMoeForConditionalGeneration if sparse else Qwen3VLForConditionalGeneration)(description)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if description.tie_word_embeddings:
        del expected["lm_head.weight"]
    # In memory transformers keeps experts transposed against the released files.
    entries = model_map(description, "transposed" if sparse else "released")
    assert {entry.name: entry.tensor_shape for entry in entries} == expected
    count = sum(torch.Size(shape).numel() for shape in expected.values())
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_the_forms_of_a_released_size_fill_the_same_parameters() -> None:
    description = released.configuration("30B-A3B")
    wanted = parameter_shapes(model_map(description, "released"), 4, 2)
    for form in ("transposed", "separate"):
        assert parameter_shapes(model_map(description, form), 4, 2) == wanted


@pytest.mark.parametrize("name", released.SIZES)
def test_the_sizes_in_use_divide_every_released_size(name: str) -> None:
    experts = 8 if released.SIZES[name].experts else 1
    for tensor in (1, 2, 4):
        check_sizes(released.configuration(name).text_config, Sizes(tensor=tensor, pipeline=8, expert=experts))
