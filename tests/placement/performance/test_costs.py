"""Predicted costs against sums by hand, the trainer's own count of operations, and published measurements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from megatron_webrl.model.parameter_counts import count_parameters
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.qwen3_5 import delta_net
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.placement import model_shape
from megatron_webrl.placement.cost_model import EngineCosts, PassSeconds, StageCosts
from megatron_webrl.placement.hardware import CARDS, Rates
from megatron_webrl.placement.memory_estimate import resolve_automatic
from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape
from megatron_webrl.placement.prediction import (
    EpisodeLengths,
    GenerationPrediction,
    TrainingBatch,
    TrainingPrediction,
    predict_generation,
    predict_training,
)
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from tests.trainer.growing_prompts import episode, random_tokens, step

LENGTHS = EpisodeLengths()
H100 = Rates.of_card(CARDS["H100"])
EIGHT = ModelShape.from_description(parameter_counts.config_sections("8B"))
# Each rate is so that its part of the model below is easy to compute by hand.
PLAIN = Rates(
    peak=1e6, products=1e6, attention=1e6, vision_attention=1e6, grouped=1e6, prefill=1e6, memory=1e6, kernels=1e6,
    nvlink=1e6, network=1e5, collective_seconds=0.0, host=1e6, pinned=1e6, float32=1e6,
    chunk_seconds=0.0, grouped_half_rows=0.0,
)  # fmt: skip
TINY: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "intermediate_size": 16, "vocab_size": 10,
    },
    "vision_config": {
        "depth": 1, "hidden_size": 4, "intermediate_size": 8, "patch_size": 1, "temporal_patch_size": 1,
        "spatial_merge_size": 1, "out_hidden_size": 8, "num_position_embeddings": 4, "deepstack_visual_indexes": [],
    },
}  # fmt: skip


def made(*overrides: str) -> Config:
    gpus = ("cluster.gpus_per_node=8", "cluster.engine_gpus_per_node=4", "trainer.data_parallel=0", "rollout.engines=0")
    return parse_config(None, [*gpus, "trainer.recompute=none", "model.dtype=bfloat16", *overrides])


def predicted(size: str, *overrides: str) -> TrainingPrediction:
    description = parameter_counts.config_sections(size)
    return predict_training(made(*overrides), description, H100, LENGTHS)


def test_the_parts_of_a_small_pass_are_those_by_hand() -> None:
    config = made("cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1")
    shape = MicrobatchShape.of_sequences([3, 2], 4, [(1, 2, 2)])
    assert (shape.tokens, shape.pairs, shape.patches, shape.patch_pairs) == (5, 6 + 3, 4, 16)
    found = StageCosts(config, ModelShape.from_description(TINY), PLAIN, shape, 0).seconds(training=True)
    attention, mlp = 8 * (8 + 4 + 4) + 8 * 8, 3 * 8 * 16  # weights of a layer: q, k, v, output; gate, up, down
    assert found.compute["products"] == pytest.approx(3 * 2 * 2 * 5 * (attention + mlp) / 1e6)
    # Two products of 8 values for each pair, in two layers; 3.5 times with the backward pass.
    assert found.compute["attention"] == pytest.approx(3.5 * 2 * 2 * 2 * 9 * 8 / 1e6)
    logits = 4 * 10
    assert found.compute["output layer"] == pytest.approx((3 * 2 * logits * 8 + 12 * 4 * logits) / 1e6)
    head = made("cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1", "model.head_dtype=float32")
    exact = StageCosts(head, ModelShape.from_description(TINY), PLAIN, shape, 0).seconds(training=True)
    # Of 4 bytes instead of 2: written, read twice, its gradient written; and read and written to be rounded.
    assert exact.total - found.total == pytest.approx((4 * 2 + 4 + 2) * logits / 1e6)
    # Values of the hidden size, of queries and keys, and of the MLP, in two layers, 2 bytes each; and 10 bytes for each
    # weight of embedding and vision tower, whose gradients are added to buffers.
    passes = ((10 * 8 + (2 + 5) * (8 + 4) + 2 * 4 + 3 * 16), (12 * 8 + (3 + 5) * (8 + 4) + 5 * 16))
    added = 10 * (10 * 8 + count_parameters(TINY).vision)
    assert found.compute["other kernels"] == pytest.approx((2 * 2 * 5 * sum(passes) + added) / 1e6)
    tower = 4 * 4 * 4 + 2 * 4 * 8 + 3 * 4 + 4 * (4 + 8)  # a block, the patch embedding, the merger
    kernels = 3 * 4 * 2 * (26 * 4 + 4 * 8)  # bytes, 2 for a value
    assert found.compute["vision"] == pytest.approx((3 * 2 * 4 * tower + 3.5 * 4 * 16 * 4 + kernels) / 1e6)
    assert not any(found.exposed.values())


@pytest.mark.parametrize("size", ["8B", "30B-A3B", "Qwen3.5-9B", "Qwen3.5-35B-A3B"])
def test_mfu_counts_the_operations_that_the_trainer_counts(size: str) -> None:
    grid, lengths, response = (1, 48, 80), (3000, 700), 240
    model = ModelShape.from_description(parameter_counts.config_sections(size))
    shape = MicrobatchShape.of_sequences(lengths, response, [grid])
    for train_vision in (True, False):
        own = FlopsEstimator.from_hf_config(parameter_counts.make_hf_config(size), train_vision)
        expected = sum(own.segment_flops(0, length) for length in lengths) + response * own.per_scored_token
        expected += own.image_flops(grid)
        assert model.useful(shape, train_vision) == pytest.approx(3 * expected, rel=1e-6)


def test_a_published_run_is_near_the_prediction() -> None:
    # torchtitan: Llama 3.1 8B, 8,192 tokens a sequence, 6,514 tokens/s for each of 128 H100. Its shape is near that of
    # Qwen3-VL-8B; every token has logits. Gradients and weights travel behind computation there.
    config = made("trainer.recompute=selective")
    model = ModelShape.from_description(parameter_counts.config_sections("8B"))
    shape = MicrobatchShape.of_sequences([8192], 8192, [])
    seconds = StageCosts(config, model, H100, shape, 0).seconds(training=True).total
    assert 8192 / seconds == pytest.approx(6514, rel=0.25)


def test_less_recomputation_is_faster_and_recomputed_operations_do_not_count() -> None:
    by_kind = [predicted("8B", f"trainer.recompute={kind}") for kind in ("none", "selective", "full")]
    assert [each.train_seconds for each in by_kind] == sorted({each.train_seconds for each in by_kind})
    assert len({each.operations for each in by_kind}) == 1
    one, two = (predicted("30B-A3B", "trainer.groups_per_update=64", f"cluster.nodes={nodes}") for nodes in (4, 8))
    assert one.train_seconds / 2 <= two.train_seconds <= one.train_seconds
    assert 0 < two.mfu <= one.mfu < 1


def test_a_pipelines_bubble_is_that_of_its_ramp() -> None:
    overrides = ("trainer.pipeline_parallel=2", "trainer.epochs=1", "trainer.loss.name=raft",
                 "trainer.train_vision=false")  # fmt: skip
    found = predicted("32B", *overrides)
    description = parameter_counts.config_sections("32B")
    config, model = resolve_automatic(made(*overrides), description), ModelShape.from_description(description)
    count, shape = TrainingBatch.of_config(config, LENGTHS, model).microbatches(config)
    rates = H100
    slowest = max(StageCosts(config, model, rates, shape, stage).seconds(training=True).total for stage in (0, 1))
    assert found.microbatches == count > 1
    assert found.parts["pipeline bubble"] == pytest.approx(slowest)  # one stage waits for the other once
    passes = sum(found.parts.values()) - found.parts["optimizer"] - found.parts.get("gradients and weights", 0.0)
    assert passes == pytest.approx((count + 1) * slowest)


def test_collectives_travel_over_the_network_beyond_a_node() -> None:
    inside, beyond = (
        predicted("30B-A3B", "cluster.nodes=4", f"trainer.expert_parallel={size}").parts["expert parallel"]
        for size in (4, 8)
    )
    # Three of four ranks are of the own node, or three of seven others; those get their part over the network.
    assert beyond / inside == pytest.approx((4 / 8) / 50 / ((3 / 4) / 450), rel=0.03)  # and 20 microseconds


def test_a_ring_uses_the_network_cards_of_all_its_ranks_on_a_node() -> None:
    found = [H100.ring(ranks, 4, stride) / H100.network for ranks, stride in ((8, 1), (8, 2), (8, 4), (2, 2))]
    assert found == pytest.approx([4, 2, 1, H100.nvlink / H100.network])


def test_gradients_travel_only_between_replicas() -> None:
    assert "gradients and weights" not in predicted("2B", "trainer.tensor_parallel=4").parts
    parameters = parameter_counts.config_sections("2B")
    config = made("trainer.tensor_parallel=2", "trainer.epochs=1", "trainer.minibatches=1")
    found = predict_training(config, parameters, replace(PLAIN, nvlink=1e9), LENGTHS).parts["gradients and weights"]
    model = ModelShape.from_description(parameters)
    tower = model.counts.vision
    local = (model.counts.total - tower) / 2 + tower
    assert found == pytest.approx(6 * local / 2 / 1e9)  # float32 one way and bfloat16 back, half stays


def test_state_in_the_hosts_memory_travels_there_and_back_in_each_step() -> None:
    device, host = (predicted("8B", f"trainer.optimizer.keep={keep}") for keep in ("device", "host"))
    steps = made().trainer.epochs * made().trainer.minibatches
    moved = steps * 2 * 12 * EIGHT.counts.total / device.ranks / 40e9
    assert host.parts["optimizer"] - device.parts["optimizer"] == pytest.approx(moved, rel=1e-6)


def test_shared_tokens_are_computed_once_and_appended_turns_are_one_sequence() -> None:
    every, none = (predicted("8B", f"trainer.merge_prefixes={choice}") for choice in ("all", "none"))
    assert every.tokens < none.tokens
    append = predicted("8B", "rollout.context.policy=append")
    assert append.tokens < every.tokens


def packed_shape(packed: PackedInput) -> MicrobatchShape:
    """The shape of a micro-batch whose sequences may branch: a segment's tokens attend to those of its ancestors."""
    assert packed.parents is not None
    starts, parents = packed.cu_seqlens.tolist(), packed.parents.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    before: list[int] = []  # tokens of the ancestors of each segment; parents come first
    for parent in parents:
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
    alone = MicrobatchShape.of_sequences(lengths, len(packed.scored_positions), packed.grids.tolist())
    pairs = sum(length * earlier for length, earlier in zip(lengths, before, strict=True))
    return replace(alone, pairs=alone.pairs + pairs)


def test_a_packed_tree_has_the_operations_that_the_trainer_counts(tiny_model: Path) -> None:
    processor, cost = Processor.load(tiny_model), FlopsEstimator.from_hf_config(load_hf_config(tiny_model))
    start = random_tokens(0, 90)
    branches = [step(np.concatenate([start, random_tokens(seed, 20 * seed)]), random_tokens(9, 7)) for seed in (1, 2)]
    samples = [*branches, *episode(processor, 0, (6, 2))]
    packer = SequencePacker(processor, 4000, torch.device("cpu"), 0, 1, cost)
    [batch] = packer.build(samples, "token_mean", 1)
    assert (batch.inputs.parents >= 0).any()
    model = ModelShape.from_description(read_model_config(str(tiny_model)))
    assert model.useful(packed_shape(batch.inputs)) == pytest.approx(3 * batch.operations, rel=1e-6)


# -- linear attention ------------------------------------------------------------------------------

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9}
SHAPE = MicrobatchShape.of_sequences([192, 64], 4, [])
RULE = 6 * 2 * 3 * 5  # two heads: three products with the state
BETWEEN = 2 * (2 * 64 * (3 + 3 + 5) + 64 * (3 + 5))  # tokens of a chunk; the triangular system is half full


def linear_model(**text: Any) -> ModelShape:
    return ModelShape.from_description(TINY | {"text_config": TINY["text_config"] | LINEAR | text})


def seconds(of: ModelShape, rates: Rates, *overrides: str, training: bool = True) -> PassSeconds:
    return StageCosts(made(*overrides), of, rates, SHAPE, 0).seconds(training)


def test_a_layer_projects_convolves_and_applies_the_rule() -> None:
    assert model_shape.CHUNK == delta_net.CHUNK
    found = linear_model()
    channels, values = 3 + 3 + 10, 10  # query, key, values; the gate has the width of the values
    projections = 8 * (channels + values + 2 * 2) + values * 8 + 4 * channels
    assert found.projections(0, SHAPE) == 2 * 256 * (projections + 3 * 8 * 16)
    assert found.projections(1, SHAPE) == 2 * 256 * (8 * (2 * 8 + 4 + 4) + 8 * 8 + 3 * 8 * 16)  # a gate beside q
    assert (found.attention(0, SHAPE), found.delta_rule(1, SHAPE)) == (0, 0)
    assert found.attention(1, SHAPE) == 4 * (192 * 193 / 2 + 64 * 65 / 2) * 8
    assert found.delta_rule(0, SHAPE) == 256 * RULE
    assert found.chunked_delta_rule(0, SHAPE) == 256 * (RULE + BETWEEN)


def test_every_token_meets_router_shared_expert_and_its_gate() -> None:
    dense, sparse = (linear_model(**more).projections(1, SHAPE) for more in ({}, SPARSE))
    assert sparse - dense == 2 * 256 * 8 * (6 + 3 * 9 + 1 - 3 * 16)
    assert linear_model(**SPARSE).experts(1, SHAPE) == 2 * 256 * 2 * 3 * 8 * 7


def test_the_rule_takes_arithmetic_and_traffic_or_the_chunks_of_a_sequence_in_turn() -> None:
    gpus = ("cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1")
    plain = seconds(linear_model(), PLAIN, *gpus)
    linear = linear_model().text.linear
    assert linear is not None
    rule = 256 * (RULE + BETWEEN + 2 * model_shape.rule_bytes(linear, 2)) / 1e6
    assert plain.compute["delta rule"] == pytest.approx(3 * rule)  # a backward pass takes twice as long
    slow = seconds(linear_model(), replace(PLAIN, chunk_seconds=10.0), *gpus)
    chunks = (0.75 * 192 + 0.25 * 64) / 64  # of a token's sequence, in the mean
    assert slow.compute["delta rule"] == pytest.approx(3 * chunks * 10.0)
    again = seconds(linear_model(), PLAIN, *gpus, "trainer.recompute=selective")
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


# -- generation ------------------------------------------------------------------------------------


def engine(*overrides: str, model: ModelShape = EIGHT) -> EngineCosts:
    return EngineCosts(made(*overrides), model, H100)


def generated(size: str, *overrides: str, lengths: EpisodeLengths | None = None) -> GenerationPrediction:
    sections = parameter_counts.config_sections(size)
    return predict_generation(made(*overrides), sections, H100, lengths or LENGTHS)


def test_tokens_and_a_prompt_take_about_as_long_as_published() -> None:
    # silybench-data, Qwen3-8B in bfloat16 on one H100, vLLM 0.30: docs/scaling.md.
    for requests, context, milliseconds in ((1, 512, 6.87), (64, 1088, 9.6), (128, 1088, 12.3), (256, 1088, 18.6)):
        assert 1000 * engine().decode(requests, context) == pytest.approx(milliseconds, rel=0.25)
    assert 1000 * engine().prefill(2048, 0) == pytest.approx(61, rel=0.25)


def test_a_single_request_reads_all_weights_and_a_mixture_reads_few_experts() -> None:
    seconds = engine().decode(1, 0)
    text = EIGHT.counts.total - EIGHT.counts.embedding_parameters - EIGHT.counts.vision
    assert seconds == pytest.approx(2 * text / (0.8 * 3.35e12) + 0.5e-3, rel=1e-6)
    mixture = ModelShape.from_description(parameter_counts.config_sections("30B-A3B"))
    alone, many = (engine(model=mixture).decode(requests, 0) for requests in (1, 128))
    assert alone < seconds / 1.5  # 3B of 30B
    assert many > 3 * alone  # nearly all experts


def test_requests_in_the_engine_balance_those_in_browsers() -> None:
    found = generated("8B")
    episodes = 4 * 8
    assert 1 < found.requests < episodes
    # Little's law: episodes in browsers are the steps per second times the seconds of each.
    assert episodes - found.requests == pytest.approx(LENGTHS.browser_seconds / found.step_seconds, rel=1e-6)


def test_slow_browsers_leave_the_engine_idle() -> None:
    slow = generated("8B", lengths=EpisodeLengths(browser_seconds=10000.0))
    assert slow.requests < 1
    one = slow.step_seconds  # of one request alone
    assert slow.response_tokens_per_second == pytest.approx(4 * 32 * 240 / (10000 + one), rel=0.01)


def test_engines_compute_no_more_requests_than_their_limit() -> None:
    quick = EpisodeLengths(browser_seconds=0.01)
    assert generated("8B", lengths=quick).requests > 30
    assert generated("8B", "rollout.max_num_seqs=8", lengths=quick).requests == 8


def test_more_engines_and_a_fuller_cache_are_faster() -> None:
    one, two = generated("8B"), generated("8B", "cluster.nodes=2")
    assert two.update_seconds == pytest.approx(one.update_seconds / 2)
    append = generated("8B", "rollout.context.policy=append")
    assert append.hit_rate > 0.5 > one.hit_rate > 0
    assert append.parts["prefill"] / append.prompt_tokens < one.parts["prefill"] / one.prompt_tokens
    assert append.parts["images"] == one.parts["images"]  # the one new screenshot


def test_an_fp8_cache_and_tensor_parallel_ranks_shorten_a_token() -> None:
    plain = engine().decode(64, 4000)
    assert engine("rollout.engine_options.kv_cache_dtype=fp8").decode(64, 4000) < plain
    assert plain / 2 < engine("rollout.tensor_parallel=2").decode(64, 4000) < plain
