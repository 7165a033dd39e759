"""Predicted operations and seconds of linear attention against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_webrl.model import parameter_counts
from megatron_webrl.model.qwen3_5 import delta_net
from megatron_webrl.placement import model_shape
from megatron_webrl.placement.cost_model import EngineCosts, PassSeconds, StageCosts
from megatron_webrl.placement.hardware import Rates
from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape
from tests.placement.performance.test_training import PLAIN, TINY, made

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9}
SHAPE = MicrobatchShape.of_sequences([192, 64], 4, [])
RULE = 6 * 2 * 3 * 5  # two heads: three products with the state
BETWEEN = 2 * (2 * 64 * (3 + 3 + 5) + 64 * (3 + 5))  # tokens of a chunk; the triangular system is half full


def model(**text: Any) -> ModelShape:
    return ModelShape.from_description(TINY | {"text_config": TINY["text_config"] | LINEAR | text})


def seconds(of: ModelShape, rates: Rates, *overrides: str, training: bool = True) -> PassSeconds:
    return StageCosts(made(*overrides), of, rates, SHAPE, 0).seconds(training)


def test_the_costs_are_those_of_the_chunks_that_the_model_computes() -> None:
    assert model_shape.CHUNK == delta_net.CHUNK


def test_a_layer_projects_convolves_and_applies_the_rule() -> None:
    found = model()
    channels, values = 3 + 3 + 10, 10  # query, key, values; the gate has the width of the values
    projections = 8 * (channels + values + 2 * 2) + values * 8 + 4 * channels
    assert found.projections(0, SHAPE) == 2 * 256 * (projections + 3 * 8 * 16)
    assert found.projections(1, SHAPE) == 2 * 256 * (8 * (2 * 8 + 4 + 4) + 8 * 8 + 3 * 8 * 16)  # a gate beside q
    assert (found.attention(0, SHAPE), found.delta_rule(1, SHAPE)) == (0, 0)
    assert found.attention(1, SHAPE) == 4 * (192 * 193 / 2 + 64 * 65 / 2) * 8
    assert found.delta_rule(0, SHAPE) == 256 * RULE
    assert found.chunked_delta_rule(0, SHAPE) == 256 * (RULE + BETWEEN)


def test_every_token_meets_router_shared_expert_and_its_gate() -> None:
    dense, sparse = (model(**more).projections(1, SHAPE) for more in ({}, SPARSE))
    assert sparse - dense == 2 * 256 * 8 * (6 + 3 * 9 + 1 - 3 * 16)
    assert model(**SPARSE).experts(1, SHAPE) == 2 * 256 * 2 * 3 * 8 * 7


def test_the_rule_takes_arithmetic_and_traffic_or_the_chunks_of_a_sequence_in_turn() -> None:
    gpus = ("cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1")
    plain = seconds(model(), PLAIN, *gpus)
    linear = model().text.linear
    assert linear is not None
    rule = 256 * (RULE + BETWEEN + 2 * model_shape.rule_bytes(linear, 2)) / 1e6
    assert plain.compute["delta rule"] == pytest.approx(3 * rule)  # a backward pass takes twice as long
    slow = seconds(model(), replace(PLAIN, chunk_seconds=10.0), *gpus)
    chunks = (0.75 * 192 + 0.25 * 64) / 64  # of a token's sequence, in the mean
    assert slow.compute["delta rule"] == pytest.approx(3 * chunks * 10.0)
    again = seconds(model(), PLAIN, *gpus, "trainer.recompute=selective")
    assert again.compute["delta rule"] == pytest.approx(4 * rule)


def test_tensor_parallel_ranks_share_heads_but_not_chunks() -> None:
    description = ModelShape.from_description(parameter_counts.config_sections("Qwen3.5-9B"))
    for rates, factor in ((PLAIN, 0.5), (replace(PLAIN, chunk_seconds=1e9), 1.0)):
        one, two = (seconds(description, rates, f"trainer.tensor_parallel={size}", training=False) for size in (1, 2))
        assert two.compute["delta rule"] == pytest.approx(factor * one.compute["delta rule"])


def test_an_engine_reads_states_instead_of_a_cache_that_grows() -> None:
    found = ModelShape.from_description(parameter_counts.config_sections("Qwen3.5-9B"))
    engine = EngineCosts(made(), found, PLAIN)
    cache = 8 * 2 * 4 * 256 * 2  # bytes of a token in the eight layers of full attention
    assert engine.decode(1, 101) - engine.decode(1, 100) == pytest.approx(cache / 1e6)
    longer, shorter = (engine.prefill(tokens, 0) for tokens in (2, 1))
    rule = model_shape.chunked_operations(found.text.linear)  # type: ignore[arg-type]
    weights = found.counts.total - found.counts.vision
    weights -= 2 * found.counts.embedding_parameters  # a lookup, and logits of one token
    assert longer - shorter == pytest.approx((2 * weights + 8 * 4 * 2 * 16 * 256 + 24 * rule) / 1e6)
