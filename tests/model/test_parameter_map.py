"""The parameter map: every element has exactly one location at every tensor-parallel size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.parameter_map import (
    ExpertFormat,
    ParameterMapping,
    from_megatron,
    parameter_shapes,
    to_megatron,
)
from tests.model import tiny


def _text_mappings(
    groups: int, heads: int, dim: int, inner: int, vocabulary: int, experts: ExpertFormat | None = None
) -> tuple[ParameterMapping, ...]:
    """Tensors of the text model of one layer, dense or, given the experts' format, of three experts."""
    hf_config = tiny.configuration(tiny.Shape(layers=1, experts=3 if experts else 0, key_value_heads=groups))
    text = hf_config.text_config
    text.vocab_size, text.hidden_size, text.intermediate_size, text.moe_intermediate_size = vocabulary, 6, inner, inner
    text.num_attention_heads, text.head_dim = groups * heads, dim
    whole = parameter_mappings(hf_config, experts or "released")
    return tuple(mapping for mapping in whole if not mapping.hf_param.startswith("model.visual."))


@settings(max_examples=120, derandomize=True)
@given(
    experts=st.sampled_from([None, "released", "transposed", "separate"]),
    size=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 2),
    heads=st.integers(1, 3),
    dim=st.integers(1, 3),
    inner=st.integers(1, 3),
    vocabulary=st.integers(1, 9),
)
def test_every_element_of_every_tensor_has_exactly_one_location(
    experts: ExpertFormat | None, size: int, groups: int, heads: int, dim: int, inner: int, vocabulary: int
) -> None:
    mappings = _text_mappings(groups * size, heads, dim, inner * size, vocabulary, experts)
    shapes = parameter_shapes(mappings, size, size)
    parameters = [{name: torch.full(shape, torch.nan) for name, shape in shapes.items()} for _ in range(size)]
    numbers = iter(range(1, 10**9))
    tensors = {}
    for mapping in mappings:
        if mapping.hf_param not in tensors:
            count = torch.Size(mapping.tensor_shape).numel()
            numbered = torch.tensor([next(numbers) for _ in range(count)], dtype=torch.float32)
            tensors[mapping.hf_param] = numbered.view(mapping.tensor_shape)
        for rank in range(size):
            to_megatron(mapping, tensors[mapping.hf_param], parameters[rank][mapping.megatron_param], rank, size)
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for mapping in mappings:
        shards = [parameters[rank][mapping.megatron_param] for rank in range(size)]
        from_megatron(mapping, shards, back[mapping.hf_param])
        if mapping.layout.kind != "replicated":
            for shard in shards:
                placed = shard[shard != 0]  # zero is padding; a place left out would be NaN
                assert not placed.isnan().any()
                assert placed.unique().numel() == placed.numel()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize(
    ("groups", "inner", "message"), [(2, 4, "query_groups=2 .*q_proj"), (4, 6, "rows=6 .*gate_proj")]
)
def test_a_size_that_does_not_divide_a_tensor_is_refused_by_name(groups: int, inner: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel=4 does not divide {message}"):
        parameter_shapes(_text_mappings(groups, 1, 1, inner, 8), 4)
