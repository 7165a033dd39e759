"""Settings that depend on the model or the engines: linear attention, routing replay, options of vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.engine_options import check_engine_options
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.launch.validation import check_settings
from megatron_webrl.model.hf_config import choose_prefix_merging, read_model_config
from megatron_webrl.model.parameter_counts import config_sections
from megatron_webrl.model.vision_language.routing_replay import (
    MODEL_RUNNER,
    check_routing_replay,
    records_experts,
    replay_obstacle,
    replays_routing,
)
from megatron_webrl.placement.memory_estimate import check_parallel_layout
from megatron_webrl.rollout.engine.vllm_environment import engine_environment
from tests.config.conftest import refusal


def with_options(*options: str) -> Config:
    return parse_config(None, [f"rollout.engine_options.{option}" for option in options])


def test_options_of_the_engine_that_settings_and_the_project_govern_are_refused_and_others_accepted() -> None:
    for option, message in {
        "max_num_seqs=8": "rollout.engine_options.max_num_seqs is governed by rollout.max_num_seqs",
        "data_parallel_rank=1": "rollout.engine_options.data_parallel_rank is governed by rollout.engines",
        "logprobs_mode=raw_logits": "logprobs_mode cannot be set",
        "quantization=fp8": "quantization cannot be set",
        "load_format=dummy": "load_format cannot be set",
    }.items():
        assert message in refusal(check_settings, with_options(option), config_sections("2B"))
    for option in ("block_size=32", "async_scheduling=false", "compilation_config={mode: 3}"):
        check_settings(with_options(option), config_sections("2B"))
    quantised = with_options("quantization=fp8", "load_format=safetensors").rollout.engine_options
    check_engine_options(quantised, in_training=False)


def configured(**trainer: Any) -> Config:
    config = Config()
    config.model.path, config.model.platform, config.rollout.dtype = "model", "cpu", "bfloat16"
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    return config


def refused(config: Config, **text: int) -> str:
    description = config_sections("Qwen3.5-9B")
    description["text_config"] |= text
    return refusal(check_parallel_layout, config, description)


def test_prefixes_are_merged_where_no_state_would_be_handed_to_several_continuations() -> None:
    hybrid, other = config_sections("Qwen3.5-9B"), config_sections("8B")
    assert [choose_prefix_merging("auto", each) for each in (hybrid, other)] == ["trajectory", "all"]
    assert choose_prefix_merging("none", other) == "none"
    check_parallel_layout(configured(), hybrid)
    check_parallel_layout(configured(merge_prefixes="all"), other)
    assert "trainer.merge_prefixes=all would have the linear attention" in refused(configured(merge_prefixes="all"))
    assert "trainer.context_parallel=2 cannot split the state" in refused(configured(context_parallel=2))


def test_linear_attention_that_vllm_cannot_compute_on_the_cpu_is_refused() -> None:
    config = configured()
    config.rollout.dtype = "float32"
    assert "bfloat16 only, not in float32; set rollout.dtype=bfloat16" in refused(config)
    assert "heads of width 128 only, not 64 and 128" in refused(configured(), linear_key_head_dim=64)
    config.model.platform = "cuda"
    check_parallel_layout(config, config_sections("Qwen3.5-9B"))


def test_routing_is_replayed_where_engines_record_it_and_on_is_refused_elsewhere(
    tiny_model: Path, tiny_sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODEL_RUNNER, "1")

    def replays(model: Path, words: str = "", **rollout: Any) -> bool:
        """Whether auto replays; where it does not, `on` is refused with `words`."""
        auto, on, off = (configured(routing_replay=setting) for setting in ("auto", "on", "off"))
        for config in (auto, on, off):
            config.model.path, config.rollout = str(model), replace(config.rollout, **rollout)
        sections = read_model_config(str(model))
        assert not replays_routing(off)
        check_routing_replay(auto, sections)
        if words:
            assert words in refusal(check_routing_replay, on, sections)
        else:
            check_routing_replay(on, sections)
            assert replays_routing(on)
        on.evaluation.only = True  # records nothing and refuses nothing
        check_routing_replay(on, sections)
        assert not records_experts(on)
        assert records_experts(auto) == replays_routing(auto)
        return replays_routing(auto)

    assert replays(tiny_sparse_model)
    assert not replays(tiny_model, "trainer.routing_replay=on needs a mixture of experts")
    assert not replays(tiny_sparse_model, "rollout.pipeline_parallel=2", pipeline_parallel=2)
    guesses = {"speculative_config": {"method": "x"}}
    assert not replays(tiny_sparse_model, "rollout.engine_options.speculative_config", engine_options=guesses)
    uncached = {"enable_prefix_caching": False}
    assert not replays(tiny_sparse_model, "engine_options.enable_prefix_caching=false", engine_options=uncached)
    monkeypatch.delenv(MODEL_RUNNER)
    assert not replays(tiny_sparse_model, "VLLM_USE_V2_MODEL_RUNNER=1 in the environment")


def test_on_a_gpu_vllm_chooses_the_model_runner_and_on_the_cpu_it_is_the_one_that_needs_no_triton(
    tiny_sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(routing_replay="auto")
    config.model.path = str(tiny_sparse_model)
    for platform, given, chosen, replays in (
        ("cpu", None, "0", False), ("cpu", "1", "1", True), ("cuda", None, None, True), ("cuda", "0", None, False)
    ):  # fmt: skip
        monkeypatch.delenv(MODEL_RUNNER, raising=False)
        if given is not None:
            monkeypatch.setenv(MODEL_RUNNER, given)
        config.model.platform = platform
        assert engine_environment(config).get(MODEL_RUNNER) == chosen
        assert (replays_routing(config), not replay_obstacle(config)) == (replays, replays)
    config.trainer.routing_replay = "off"
    assert not replay_obstacle(config)  # nobody asked for it
