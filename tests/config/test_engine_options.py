"""rollout.engine_options and the build of vLLM, checked without importing it."""

from __future__ import annotations

from megatron_webrl.config.engine_options import check_engine_options
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.launch.validation import check_settings
from megatron_webrl.model.parameter_counts import config_sections
from tests.config.conftest import refusal


def made(*options: str) -> Config:
    return parse_config(None, [f"rollout.engine_options.{option}" for option in options])


def test_what_settings_and_the_project_govern_is_refused() -> None:
    for option, message in {
        "max_num_seqs=8": "rollout.engine_options.max_num_seqs is governed by rollout.max_num_seqs",
        "seed=8": "rollout.engine_options.seed is governed by run.seed",
        "data_parallel_rank=1": "rollout.engine_options.data_parallel_rank is governed by rollout.engines",
        "logprobs_mode=raw_logits": "logprobs_mode cannot be set",
        "quantization=fp8": "quantization cannot be set",
        "load_format=dummy": "load_format cannot be set",
    }.items():
        assert message in refusal(check_settings, made(option), config_sections("2B"))


def test_an_engine_without_a_trainer_may_be_quantised() -> None:
    config = made("quantization=fp8", "load_format=safetensors")
    config.evaluation.only = True
    check_engine_options(config.rollout.engine_options, in_training=not config.evaluation.only)


def test_other_arguments_of_vllm_are_accepted() -> None:
    for option in ("block_size=32", "async_scheduling=false", "compilation_config={mode: 3}"):
        check_settings(made(option), config_sections("2B"))
