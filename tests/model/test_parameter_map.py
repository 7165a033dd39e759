"""The parameter map: every element has exactly one location at every tensor-parallel size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.parameter_map import (
    ExpertFormat,
    ParameterMapping,
    from_megatron,
    padded_vocab_size,
    parameter_shapes,
    shard_ranges,
    to_megatron,
)
from tests.model import tiny


def _text_mappings(
    groups: int, heads: int, dim: int, inner: int, vocabulary: int, experts: ExpertFormat | None = None
) -> tuple[ParameterMapping, ...]:
    """Tensors of the text model of one layer, dense or, given the experts' format, of three experts."""
    hf_config = tiny.configuration(tiny.Shape())
    text = SimpleNamespace(
        vocab_size=vocabulary,
        hidden_size=6,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=groups * heads,
        num_key_value_heads=groups,
        head_dim=dim,
        num_experts=3 if experts else 0,
        moe_intermediate_size=inner,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )
    whole = parameter_mappings(
        SimpleNamespace(
            model_type=hf_config.model_type,
            text_config=text,
            vision_config=hf_config.vision_config,
            tie_word_embeddings=False,
        ),
        experts or "released",
    )
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


def test_the_map_names_the_tensors_of_a_released_model() -> None:
    """The dimensions of Qwen3-VL-4B-Instruct, whose checkpoint has 713 tensors."""
    text = {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    mappings = parameter_mappings(config)
    assert len(mappings) == 713
    assert {e.hf_param: e.shape for e in mappings} == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_query_heads_are_adjacent_to_the_key_and_value_head_of_their_group() -> None:
    q, k, v = (e for e in _text_mappings(2, 2, 1, 2, 8) if "linear_qkv" in e.megatron_param)
    parameter = torch.zeros(8, 6)
    for mapping, start in ((q, 10), (k, 20), (v, 30)):
        rows = torch.arange(start, start + mapping.shape[0]).float()
        to_megatron(mapping, rows[:, None].expand(-1, 6), parameter, 0, 1)
    assert parameter[:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]


def test_a_rank_stacks_its_gate_shard_on_its_up_shard() -> None:
    gate, up = (e for e in _text_mappings(2, 1, 1, 4, 8) if "linear_fc1" in e.megatron_param)
    parameter = torch.zeros(4, 6)
    for mapping, start in ((gate, 10), (up, 20)):
        to_megatron(mapping, torch.arange(start, start + 4).float()[:, None].expand(-1, 6), parameter, 1, 2)
    assert parameter[:, 0].tolist() == [12, 13, 22, 23]


def test_a_rank_beyond_the_vocabulary_holds_zeros_only() -> None:
    mapping = next(e for e in _text_mappings(4, 1, 1, 4, 5) if e.hf_param == "lm_head.weight")
    assert padded_vocab_size(5, 4) == 8
    assert shard_ranges(mapping, 3, 4) == ()
    parameter = torch.full((2, 6), torch.nan)
    to_megatron(mapping, torch.ones(5, 6), parameter, 3, 4)
    assert torch.equal(parameter, torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("groups", "inner", "message"),
    [(2, 4, "query_groups=2 .*q_proj"), (4, 6, "rows=6 .*gate_proj")],
)
def test_a_size_that_does_not_divide_a_tensor_is_refused_by_name(groups: int, inner: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel=4 does not divide {message}"):
        parameter_shapes(_text_mappings(groups, 1, 1, inner, 8), 4)


def test_all_formats_of_experts_fill_the_same_parameters() -> None:
    """The formats as PyTorch modules see them: out = x @ released, out = linear(x, transposed or separate)."""
    gate, up, down = torch.rand(3, 4, 6), torch.rand(3, 4, 6), torch.rand(3, 6, 4)
    fused = torch.cat([gate, up], dim=1)
    stored: dict[ExpertFormat, dict[str, torch.Tensor]] = {
        "released": {"gate_up_proj": fused.mT, "down_proj": down.mT},
        "transposed": {"gate_up_proj": fused, "down_proj": down},
        "separate": {
            f"{e}.{name}.weight": tensor[e]
            for e in range(3)
            for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
        },
    }
    for experts, tensors in stored.items():
        found = {
            mapping.megatron_param: torch.zeros(shape)
            for mappings in [_text_mappings(1, 1, 2, 4, 5, experts)]
            for mapping in mappings
            for shape in [parameter_shapes(mappings, 1)[mapping.megatron_param]]
            if mapping.expert is not None
        }
        for mapping in _text_mappings(1, 1, 2, 4, 5, experts):
            if mapping.expert is not None:
                tensor = tensors[mapping.hf_param.partition("experts.")[2]]
                assert tuple(tensor.shape) == mapping.tensor_shape
                to_megatron(mapping, tensor, found[mapping.megatron_param], 0, 1)
        for e in range(3):
            prefix = f"decoder.layers.0.mlp.experts.local_experts.{e}."
            assert torch.equal(found[f"{prefix}linear_fc1.weight"], fused[e])
            assert torch.equal(found[f"{prefix}linear_fc2.weight"], down[e])
