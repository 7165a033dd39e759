"""Predicted training against sums by hand, the trainer's own count of operations, and a published run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.parameter_counts import count_parameters
from megatron_webrl.placement.cost_model import StageCosts
from megatron_webrl.placement.hardware import CARDS, Rates
from megatron_webrl.placement.memory_estimate import resolve_automatic
from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape
from megatron_webrl.placement.prediction import EpisodeLengths, TrainingBatch, TrainingPrediction, predict_training
from megatron_webrl.trainer.data.packing import FlopsEstimator

LENGTHS = EpisodeLengths()
# Each rate is so that its part of the model below is easy to compute by hand.
PLAIN = Rates(
    peak=1e6, products=1e6, attention=1e6, vision_attention=1e6, grouped=1e6, prefill=1e6, memory=1e6, nvlink=1e6,
    network=1e5, collective_seconds=0.0, host=1e6, float32=1e6, chunk_seconds=0.0, grouped_half_rows=0.0,
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
    gpus = (
        "trainer.recompute=none",
        "cluster.gpus_per_node=8",
        "cluster.engine_gpus_per_node=4",
        "trainer.data_parallel=0",
        "rollout.engines=0",
    )
    return parse_config(None, [*gpus, "model.dtype=bfloat16", *overrides])


def predicted(size: str, *overrides: str, card: str = "H100", lengths: EpisodeLengths = LENGTHS) -> TrainingPrediction:
    description = parameter_counts.config_sections(size)
    return predict_training(made(*overrides), description, Rates.of_card(CARDS[card]), lengths)


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
    # Values of the hidden size, of queries and keys, and of the MLP, in two layers, 2 bytes each; and 10 bytes for each
    # weight of embedding and vision tower, whose gradients are added to buffers.
    passes = ((14 * 8 + (2 + 5) * (8 + 4) + 2 * 4 + 3 * 16), (28 * 8 + (4 + 5) * (8 + 4) + 5 * 16))
    added = 10 * (10 * 8 + count_parameters(TINY).vision)
    assert found.compute["other kernels"] == pytest.approx((2 * 2 * 5 * sum(passes) + added) / 1e6)
    tower = 4 * 4 * 4 + 2 * 4 * 8 + 3 * 4 + 4 * (4 + 8)  # a block, the patch embedding, the merger
    kernels = 3 * 4 * 2 * (26 * 4 + 4 * 8)  # bytes, 2 for a value
    assert found.compute["vision"] == pytest.approx((3 * 2 * 4 * tower + 3.5 * 4 * 16 * 4 + kernels) / 1e6)
    assert not any(found.exposed.values())


@pytest.mark.parametrize("size", ["2B", "8B", "30B-A3B", "Qwen3.5-9B", "Qwen3.5-35B-A3B"])
@pytest.mark.parametrize("train_vision", [True, False])
def test_mfu_counts_the_operations_that_the_trainer_counts(size: str, train_vision: bool) -> None:
    grid, lengths, response = (1, 48, 80), (3000, 700), 240
    model = ModelShape.from_description(parameter_counts.config_sections(size))
    shape = MicrobatchShape.of_sequences(lengths, response, [grid])
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
    seconds = StageCosts(config, model, Rates.of_card(CARDS["H100"]), shape, 0).seconds(training=True).total
    assert 8192 / seconds == pytest.approx(6514, rel=0.25)


@pytest.mark.parametrize("size", ["2B", "8B", "30B-A3B", "Qwen3.5-9B"])
def test_twice_the_gpus_are_not_slower_and_not_twice_as_fast(size: str) -> None:
    one, two = (predicted(size, "trainer.groups_per_update=64", f"cluster.nodes={nodes}") for nodes in (4, 8))
    assert one.train_seconds / 2 <= two.train_seconds <= one.train_seconds
    assert 0 < two.mfu <= one.mfu < 1


def test_a_faster_card_and_less_recomputation_are_faster() -> None:
    by_card = [predicted("8B", card=card).train_seconds for card in ("B200", "H200", "H100", "A100")]
    assert by_card == sorted(by_card)
    by_kind = [predicted("8B", f"trainer.recompute={kind}") for kind in ("none", "selective", "full")]
    assert [each.train_seconds for each in by_kind] == sorted({each.train_seconds for each in by_kind})
    assert len({each.operations for each in by_kind}) == 1  # recomputed ones do not count


def test_seconds_are_inverse_to_the_rates() -> None:
    rates = replace(Rates.of_card(CARDS["H100"]), collective_seconds=0.0)
    half = replace(
        rates,
        **{
            name: getattr(rates, name) / 2
            for name in ("products", "attention", "vision_attention", "grouped", "memory", "nvlink", "network")
        },
    )
    config, description = (
        made("trainer.tensor_parallel=2", "trainer.expert_parallel=2"),
        parameter_counts.config_sections("30B-A3B"),
    )
    fast, slow = (predict_training(config, description, each, LENGTHS) for each in (rates, half))
    assert slow.train_seconds == pytest.approx(2 * fast.train_seconds)
    assert {name: pytest.approx(2 * seconds) for name, seconds in fast.parts.items()} == slow.parts


def test_a_pipelines_bubble_is_that_of_its_ramp() -> None:
    overrides = (
        "trainer.pipeline_parallel=2",
        "trainer.epochs=1",
        "trainer.loss.name=raft",
        "trainer.train_vision=false",
    )
    found = predicted("32B", *overrides)
    description = parameter_counts.config_sections("32B")
    config, model = resolve_automatic(made(*overrides), description), ModelShape.from_description(description)
    count, shape = TrainingBatch.of_config(config, LENGTHS, model).microbatches(config)
    rates = Rates.of_card(CARDS["H100"])
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
    assert 450 / 50 < beyond / inside < 450 / 50 * (7 / 8) / (3 / 4) * 1.01


def test_gradients_travel_only_between_replicas() -> None:
    assert "gradients and weights" not in predicted("2B", "trainer.tensor_parallel=4").parts
    parameters = parameter_counts.config_sections("2B")
    config = made("trainer.tensor_parallel=2", "trainer.epochs=1", "trainer.minibatches=1")
    found = predict_training(config, parameters, replace(PLAIN, nvlink=1e9), LENGTHS).parts["gradients and weights"]
    model = ModelShape.from_description(parameters)
    tower = model.counts.vision
    local = (model.counts.total - tower) / 2 + tower
    assert found == pytest.approx(6 * local / 2 / 1e9)  # float32 one way and bfloat16 back, half stays


def test_longer_episodes_take_longer_and_a_sequence_must_fit() -> None:
    long = EpisodeLengths(response_tokens=480.0)
    assert predicted("8B", lengths=long).train_seconds > predicted("8B").train_seconds
    with pytest.raises(ValueError, match=r"exceeds trainer\.tokens_per_microbatch=16384"):
        predicted("8B", lengths=EpisodeLengths(response_tokens=30000.0))


def test_shared_tokens_are_computed_once_and_appended_turns_are_one_sequence() -> None:
    every, none = (predicted("8B", f"trainer.merge_prefixes={choice}") for choice in ("all", "none"))
    assert every.tokens < none.tokens
    append = predicted("8B", "rollout.context.policy=append")
    assert append.tokens < every.tokens
