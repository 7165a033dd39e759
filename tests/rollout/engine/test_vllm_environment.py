"""vLLM's configuration of an engine, without starting one."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from vllm import platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.interface import Platform, PlatformEnum

from megatron_webrl.config.engine_options import FIXED, FIXED_IN_TRAINING, SETTINGS
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.rollout.engine.vllm_environment import (
    NO_WEIGHTS,
    NodeSpan,
    engine_arguments,
    engine_config,
    engine_environment,
)
from megatron_webrl.weights.vllm_worker import LOAD_FORMAT
from tests.rollout.engine.engines import configuration


@pytest.fixture
def config(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    config = configuration(tiny_model)
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    return config


def with_rollout(config: Config, **changes: Any) -> Config:
    return replace(config, rollout=replace(config.rollout, **changes))


def test_an_engine_computes_the_tokens_of_a_server_and_the_requests_of_its_episodes(config: Config) -> None:
    """vLLM's CPU build multiplies its default by the ranks; without a server as its user it would not."""
    config = with_rollout(config, tensor_parallel=2, group_size=6, groups_in_flight=3)
    found = engine_config(config, 0)
    scheduler, vision = found.scheduler_config, found.model_config.multimodal_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (2 * 2048, 18)
    assert vision is not None
    assert vision.mm_encoder_tp_mode == "data"  # the vision tower is whole on every rank
    config = replace(config, evaluation=replace(config.evaluation, every=5))
    assert engine_config(config, 0).scheduler_config.max_num_seqs == 22


def test_an_engine_in_float32_on_a_gpu_multiplies_in_float32(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    for platform, dtype, wanted in (
        ("cuda", "float32", "ieee"), ("cuda", "bfloat16", None), ("cpu", "float32", None)
    ):  # fmt: skip
        model = replace(config.model, platform=platform)
        on = replace(config, model=model, rollout=replace(config.rollout, dtype=dtype))
        assert engine_environment(on).get("TRITON_F32_DEFAULT") == wanted
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    on = replace(config, model=replace(config.model, platform="cuda"), rollout=replace(config.rollout, dtype="float32"))
    assert engine_environment(on)["TRITON_F32_DEFAULT"] == "tf32x3"


def test_governed_arguments_exist_and_no_other_is_set(config: Config) -> None:
    """An argument that the project sets is either refused in rollout.engine_options, or a default that they replace."""
    governed = {*SETTINGS, *FIXED, *FIXED_IN_TRAINING}
    assert governed <= {field.name for field in fields(AsyncEngineArgs)}
    config = with_rollout(config, tensor_parallel=2, expert_parallel=True)
    config.model.platform = "cuda"
    span = NodeSpan(nnodes=2, node_rank=1, host_ip="127.0.0.1", master_addr="127.0.0.1", master_port=29500)
    ours, default = engine_arguments(config, 1, 2, span), AsyncEngineArgs(model=config.model.path)
    changed = {f.name for f in fields(ours) if getattr(ours, f.name) != getattr(default, f.name)}
    assert len(changed) > 15
    assert changed - governed == {"enable_prefix_caching", "moe_backend", "gdn_prefill_backend"}
    assert (ours.moe_backend, ours.gdn_prefill_backend) == ("triton", "triton")
    config.rollout.engine_options = {"moe_backend": "auto", "gdn_prefill_backend": "flashinfer"}
    other = engine_arguments(config, 1, 2, span)
    assert (other.moe_backend, other.gdn_prefill_backend) == ("auto", "flashinfer")


def test_engine_options_reach_vllm_and_replace_defaults(config: Config) -> None:
    options = {
        "block_size": 64, "long_prefill_token_threshold": 256, "enable_prefix_caching": False, "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 8]}, "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 1024, "load_format": "safetensors",
    }  # fmt: skip
    alone = replace(config, evaluation=replace(config.evaluation, only=True))
    found = engine_config(with_rollout(alone, engine_options=options, max_num_seqs=48), 0)
    cache, scheduler = found.cache_config, found.scheduler_config
    assert (cache.block_size, cache.enable_prefix_caching, cache.cache_dtype) == (64, False, "fp8")
    assert (scheduler.long_prefill_token_threshold, scheduler.max_num_batched_tokens) == (256, 1024)
    assert (scheduler.max_num_seqs, found.load_config.load_format) == (48, "safetensors")
    assert not found.model_config.enforce_eager
    plain = engine_config(config, 0)
    assert (plain.cache_config.enable_prefix_caching, plain.cache_config.cache_dtype) == (True, "auto")
    assert plain.model_config.enforce_eager
    # Only an engine without a trainer reads weights.
    assert plain.load_config.load_format == NO_WEIGHTS == LOAD_FORMAT
    assert engine_config(alone, 0).load_config.load_format == "auto"


def test_an_engine_that_vllm_refuses_does_not_start(config: Config) -> None:
    for options, words in (
        (
            {"block_sise": 64},
            "rollout.engine_options.block_sise is no argument of vLLM's AsyncEngineArgs",
        ),
        ({"block_size": "large"}, "vLLM refuses an engine with rollout.engine_options={'block_size': 'large'}: "),
    ):
        with pytest.raises(ConfigError) as caught:
            engine_config(with_rollout(config, engine_options=options), 0)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_vllm_of_another_device_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    class Other(Platform):
        """What vLLM's build for the other platform takes."""

        _enum = PlatformEnum.CPU if platform == "cuda" else PlatformEnum.CUDA
        device_type = "cpu" if platform == "cuda" else "cuda"

    monkeypatch.setattr(platforms, "_current_platform", Other())
    with pytest.raises(ConfigError, match=f"^model.platform={platform}, but the vLLM .* on {Other.device_type}; "):
        engine_config(replace(config, model=replace(config.model, platform=platform)), 0)
