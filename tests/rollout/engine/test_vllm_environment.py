"""vLLM's configuration of an engine, without starting one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.rollout.engine.vllm_environment import NO_WEIGHTS, engine_config, engine_environment
from megatron_webrl.weights.vllm_loader import LOAD_FORMAT
from tests.rollout.engine.engines import configuration


@pytest.fixture
def config(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    config = configuration(tiny_model)
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    return config


def test_an_engine_has_the_batch_limits_of_a_server(config: Config) -> None:
    """vLLM's CPU build multiplies them by the ranks; without a server as its user it would not."""
    scheduler = engine_config(replace(config, rollout=replace(config.rollout, tensor_parallel=2)), 0).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (2 * 2048, 2 * 128)


def test_batch_limits_can_be_set(config: Config) -> None:
    rollout = replace(config.rollout, max_num_batched_tokens=1024, max_num_seqs=48)
    scheduler = engine_config(replace(config, rollout=rollout), 0).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (1024, 48)


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


def test_only_an_engine_without_a_trainer_reads_weights(config: Config) -> None:
    alone = replace(config, evaluation=replace(config.evaluation, only=True))
    assert engine_config(config, 0).load_config.load_format == NO_WEIGHTS
    assert engine_config(alone, 0).load_config.load_format == "auto"
    assert NO_WEIGHTS == LOAD_FORMAT
