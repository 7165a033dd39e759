"""The memory estimate against the parameter map, an engine's own map, and sums done by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes, expert_rank, pipeline_stages
from megatron_webrl.model.parameter_counts import count_parameters
from megatron_webrl.model.parameter_map import parameter_shapes
from megatron_webrl.model.vision_language.vision import build_vision_tower
from megatron_webrl.placement.memory_estimate import (
    GIB,
    LOGIT_CHUNK_BYTES,
    MemoryEstimate,
    MemoryUse,
    check_memory,
    check_parallel_layout,
    choose_recompute,
    estimate_memory,
    vision_activation_widths,
)
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from tests.config.conftest import refusal
from tests.model.test_model_sizes import BILLIONS

GPUS = (
    "cluster.gpus_per_node=8", "cluster.engine_gpus_per_node=4", "trainer.data_parallel=0", "rollout.engines=0",
    "model.dtype=bfloat16",
)  # fmt: skip


def made(size: str, *overrides: str) -> tuple[Config, MemoryEstimate]:
    config = parse_config(None, [*GPUS, *overrides])
    return config, estimate_memory(config, parameter_counts.config_sections(size))


def test_the_counts_of_released_sizes_are_those_of_their_tensors() -> None:
    for size in parameter_counts.RELEASED:
        description = parameter_counts.make_hf_config(size)
        tensors = {entry.hf_param: entry.tensor_shape for entry in parameter_mappings(description)}
        found = count_parameters(parameter_counts.config_sections(size)).total
        assert found == sum(math.prod(shape) for shape in tensors.values()), size
        assert found == count_parameters(json.loads(description.to_json_string())).total, size
        if size in BILLIONS:
            assert found / 1e9 == pytest.approx(BILLIONS[size], rel=0.01), size
        _, use = made(size)
        assert use.engine.parameters == 2 * use.parameters, size  # an engine of one GPU has every weight


def test_a_ranks_parameters_are_those_that_the_parameter_map_gives_it() -> None:
    for size, sizes in (
        ("2B", ParallelSizes(tensor=2, pipeline=2)),
        ("4B", ParallelSizes(tensor=4)),
        ("8B", ParallelSizes(tensor=2, pipeline=4, virtual=3)),
        ("30B-A3B", ParallelSizes(tensor=4, pipeline=2, expert=8)),
        ("235B-A22B", ParallelSizes(tensor=4, pipeline=8, expert=16)),
        ("Qwen3.5-4B", ParallelSizes(tensor=2, pipeline=2)),
        ("Qwen3.5-9B", ParallelSizes(tensor=4, pipeline=2, virtual=2)),
        ("Qwen3.5-122B-A10B", ParallelSizes(tensor=2, pipeline=8, expert=16)),
    ):
        description = parameter_counts.make_hf_config(size)
        text, tied = description.text_config, description.tie_word_embeddings
        _, found = made(
            size, "cluster.nodes=32", f"trainer.tensor_parallel={sizes.tensor}",
            f"trainer.pipeline_parallel={sizes.pipeline}", f"trainer.virtual_pipeline={sizes.virtual}",
            f"trainer.expert_parallel={sizes.expert}",
        )  # fmt: skip
        held: list[list[Any]] = [[] for _ in range(sizes.pipeline)]
        for entry in parameter_mappings(description):
            if entry.expert is None or expert_rank(entry.expert, text.num_experts, sizes) == 0:
                for stage in pipeline_stages(entry, text.num_hidden_layers, sizes, tied):
                    held[stage].append(entry)
        for entries, use in zip(held, found.trainer, strict=True):
            numbers = sum(math.prod(s) for s in parameter_shapes(entries, sizes.tensor).values())
            assert (use.parameters, use.gradients) == (2 * numbers, 4 * numbers), size


def test_an_engines_weights_are_those_that_the_engine_map_gives_a_rank() -> None:
    for size, tensor in (("8B", 1), ("32B", 4), ("2B", 2), ("30B-A3B", 2), ("235B-A22B", 4)):
        _, found = made(size, f"rollout.tensor_parallel={tensor}")
        shapes = engine_parameter_shapes(parameter_counts.make_hf_config(size), EngineSizes(tensor=tensor), 0)
        assert found.engine.parameters == 2 * sum(math.prod(shape) for shape in shapes.values()), size


def test_the_largest_rank_of_a_pipelined_engine_is_not_underestimated() -> None:
    for size in ("32B", "235B-A22B"):
        _, found = made(size, "cluster.nodes=2", "rollout.tensor_parallel=4", "rollout.pipeline_parallel=2")
        description, sizes = parameter_counts.make_hf_config(size), EngineSizes(4, 2)
        ranks = [
            sum(math.prod(s) for s in engine_parameter_shapes(description, sizes, rank).values()) for rank in (0, 4)
        ]
        assert 2 * max(ranks) <= found.engine.parameters <= 2.1 * max(ranks)


def test_the_optimizers_state_is_shared_out_over_replicas() -> None:
    _, one = made("8B", "trainer.tensor_parallel=4")
    _, many = made("8B", "trainer.tensor_parallel=4", "cluster.nodes=8")
    assert one.trainer[0].optimizer == 6 * one.trainer[0].parameters  # 12 bytes beside the weights' 2
    assert many.trainer[0].optimizer == pytest.approx(one.trainer[0].optimizer / 8, rel=1e-6)
    assert many.trainer[0].parameters == one.trainer[0].parameters


def test_state_in_the_hosts_memory_and_activations_never_need_the_device_at_a_time() -> None:
    for recompute in ("full", "none"):
        words = ("8B", "trainer.tensor_parallel=4", f"trainer.recompute={recompute}")
        (_, device), (_, host) = (made(*words, f"trainer.optimizer.keep={keep}") for keep in ("device", "host"))
        one, other = device.trainer[0], host.trainer[0]
        passing = one.activations + one.images + one.logits
        assert other.total == one.total - min(one.optimizer, passing)
        assert (other.activations, other.optimizer) == (one.activations, max(0, one.optimizer - passing))


def test_weights_that_are_not_trained_take_neither_gradients_nor_state() -> None:
    counts = count_parameters(parameter_counts.config_sections("8B"))
    tower = counts.vision
    _, trained = made("8B", "trainer.tensor_parallel=4")
    _, frozen = made("8B", "trainer.tensor_parallel=4", "trainer.train_vision=false")
    assert trained.trainer[0].gradients - frozen.trainer[0].gradients == 4 * tower
    assert trained.trainer[0].optimizer - frozen.trainer[0].optimizer == 12 * tower
    assert trained.trainer[0].images > 5 * frozen.trainer[0].images


def test_the_vision_tower_keeps_what_is_estimated() -> None:
    vision = parameter_counts.make_hf_config("8B").vision_config
    vision.depth, vision.deepstack_visual_indexes, vision.out_hidden_size = 3, [0, 1], 64
    vision.hidden_size, vision.intermediate_size, vision.num_heads = 256, 1024, 4
    grids = torch.tensor([[1, 16, 16], [1, 8, 16]])
    block, rest = vision_activation_widths(vision.to_dict())
    for dtype in (torch.float32, torch.bfloat16):
        tower = build_vision_tower(vision, dtype, torch.device("cpu"))
        kept: dict[int, torch.Tensor] = {}  # one of each storage, which keeps its address

        def pack(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            tower(torch.zeros(384, 3 * 2 * 16 * 16, dtype=dtype), grid_thw=grids, return_dict=True)
        weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
        found = sum(kept[address].untyped_storage().nbytes() for address in kept.keys() - weights) / 384
        assert found == pytest.approx(dtype.itemsize * (3 * block + rest), rel=0.05), dtype


def test_auto_recomputes_the_least_that_leaves_a_tenth_of_a_gpu() -> None:
    description = parameter_counts.config_sections("8B")
    longest = ["trainer.tokens_per_microbatch=16384", "rollout.max_model_len=16384", "rollout.max_new_tokens=4096"]
    for gib, overrides, chosen in (
        (113, (), "none"), (111, (), "selective"), (87, (), "selective"), (85, (), "full"), (20, (), "full"),
        (138, ("cluster.colocate=true", "rollout.kv_cache_mib=8192"), "selective"),  # beside an engine
        (20, ("trainer.recompute=none",), "none"), (300, ("trainer.recompute=full",), "full"),
    ):  # fmt: skip
        settings = [*longest, f"cluster.gpu_gib={gib}", *overrides]
        config = parse_config("configs/8b_4node.yaml", settings)
        assert choose_recompute(config, description) == chosen, (gib, overrides)
        explicit = parse_config("configs/8b_4node.yaml", settings)
        explicit.trainer.recompute = chosen
        assert estimate_memory(config, description) == estimate_memory(explicit, description), (gib, overrides)
        config.cluster.gpus_per_node = 0
        assert choose_recompute(config, description) == ("none" if config.trainer.recompute == "auto" else chosen)


def test_common_prefixes_take_copies_of_keys_and_values_and_logits_of_more_tokens() -> None:
    def use(*overrides: str) -> MemoryUse:
        return made("8B", "cluster.nodes=4", *overrides)[1].trainer[0]

    for recompute, layers in (("none", 36 + 0.5), ("full", 1.5)):
        merged, shared = (
            use(f"trainer.recompute={recompute}", f"trainer.merge_prefixes={name}") for name in ("trajectory", "all")
        )
        copies = layers * 2 * (2 * 2 * 8 * 128) * 16384  # twice the tokens; keys and values of eight heads
        assert shared.activations - merged.activations == pytest.approx(copies, rel=1e-6)
        assert shared.logits - merged.logits == pytest.approx(merged.logits - LOGIT_CHUNK_BYTES, rel=1e-3)
        assert shared.images == merged.images


def test_a_float32_head_takes_ten_bytes_of_a_logit_instead_of_four_where_the_weights_are_bfloat16() -> None:
    heads = ("model.head_dtype=model", "model.head_dtype=float32")
    rounded, exact = (made("8B", head)[1].trainer[0] for head in heads)
    assert exact.logits - LOGIT_CHUNK_BYTES == (rounded.logits - LOGIT_CHUNK_BYTES) * 10 // 4
    assert exact.total - rounded.total == exact.logits - rounded.logits
    single = made("8B", "model.dtype=float32", "rollout.dtype=bfloat16", heads[1])[1].trainer[0]
    assert single.logits - LOGIT_CHUNK_BYTES == (rounded.logits - LOGIT_CHUNK_BYTES) * 2


def test_the_first_stage_holds_the_rows_of_all_stages_and_the_last_one() -> None:
    _, found = made("8B", "cluster.nodes=4", "trainer.pipeline_parallel=4", "trainer.recompute=full")
    row = 9 * 2 * 4096 * 16384  # inputs of nine layers
    at_work = found.trainer[3].activations - row
    assert found.trainer[0].activations == 4 * row + at_work
    assert [use.images > 0 for use in found.trainer] == [True, False, False, False]
    assert [use.logits > 0 for use in found.trainer] == [False, False, False, True]


def test_the_kv_cache_is_what_the_engine_leaves_of_its_share_of_the_card() -> None:
    _, found = made("8B", "rollout.gpu_memory_utilization=0.5")
    token = 2 * 36 * 8 * 128 * 2  # keys and values, layers, heads, their size, bytes
    room = 40 * GIB - 4 * GIB - found.engine.parameters
    assert found.engine.kv_cache == room
    assert found.kv_cache_tokens == room // token
    _, given = made("8B", "rollout.kv_cache_mib=1024")
    assert given.engine.kv_cache == GIB
    auto, fp8 = (made("8B", f"rollout.engine_options.kv_cache_dtype={dtype}")[1] for dtype in ("auto", "fp8"))
    assert fp8.kv_cache_tokens == pytest.approx(2 * auto.kv_cache_tokens, abs=2)


def test_linear_attention_has_a_state_for_each_request_instead_of_a_cache() -> None:
    _, found = made("Qwen3.5-9B", "rollout.tensor_parallel=2", "rollout.kv_cache_mib=8192", "rollout.max_num_seqs=16")
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2  # float32; three tokens of the channels before the convolution
    token = 8 * 2 * 4 * 256 * 2  # a quarter of 32 layers, keys and values, heads, their size, bytes
    assert found.kv_cache_tokens == (8 * GIB - 16 * 24 * state // 2) // (token // 2)
    stages = made("Qwen3.5-9B", "cluster.nodes=3", "rollout.tensor_parallel=4", "rollout.pipeline_parallel=3",
                  "rollout.kv_cache_mib=1024", "rollout.max_num_seqs=1")[1]  # fmt: skip
    layers, linear = 3, 9  # most that eleven neighbouring layers hold
    assert stages.kv_cache_tokens == (GIB - linear * state // 4) // (layers * 2 * 256 * 2)


def test_what_does_not_fit_a_card_is_refused_with_what_takes_most() -> None:
    for size, overrides, words in (
        ("32B", ["rollout.tensor_parallel=1", "cluster.gpu_gib=70"], "leave a KV cache of"),
        ("8B", ["trainer.tensor_parallel=4", "trainer.recompute=none", "trainer.tokens_per_microbatch=65536"],
         "set trainer.recompute=full, or lower trainer.tokens_per_microbatch"),
        ("32B", ["trainer.tensor_parallel=4", "trainer.recompute=full"], "trainer needs 1"),
        ("8B", ["trainer.recompute=full", "trainer.train_vision=false"], "raise trainer.tensor_parallel, pipeline"),
        ("8B", ["trainer.tensor_parallel=4", "trainer.recompute=full", "rollout.gpu_memory_utilization=1"],
         "engine needs 80.5 GiB of a GPU, more than cluster.gpu_gib=80"),
    ):  # fmt: skip
        assert words in refusal(check_memory, *made(size, *overrides))


def test_heads_of_linear_attention_that_cannot_be_split_are_refused() -> None:
    gpus = [*GPUS, "cluster.nodes=4"]
    description = parameter_counts.config_sections("Qwen3.5-9B")
    description["text_config"]["linear_num_key_heads"] = 6
    for source, sizes in (("trainer", (4, 1)), ("rollout", (1, 4))):
        roles = (f"trainer.tensor_parallel={sizes[0]}", f"rollout.tensor_parallel={sizes[1]}")
        with pytest.raises(ConfigError, match=f"does not divide linear_num_key_heads=6 .{source}.tensor_parallel"):
            check_parallel_layout(parse_config(None, [*gpus, *roles]), description)
