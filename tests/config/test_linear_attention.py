"""Settings of models with linear attention."""

from __future__ import annotations

from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.model.hf_config import choose_prefix_merging
from megatron_webrl.model.parameter_counts import config_sections
from megatron_webrl.placement.memory_estimate import check_parallel_layout
from tests.config.conftest import refusal


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


def test_what_vllm_cannot_compute_on_the_cpu_is_refused() -> None:
    config = configured()
    config.rollout.dtype = "float32"
    assert "bfloat16 only, not in float32; set rollout.dtype=bfloat16" in refused(config)
    assert "heads of width 128 only, not 64 and 128" in refused(configured(), linear_key_head_dim=64)
    config.model.platform = "cuda"
    check_parallel_layout(config, config_sections("Qwen3.5-9B"))
