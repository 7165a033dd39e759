"""The setting trainer.routing_replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.vision_language.routing_replay import check_routing_replay, records_experts, replays_routing


@pytest.fixture(autouse=True)
def first_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def configured(model: Path, setting: str) -> Config:
    config = Config()
    config.model.path, config.trainer.routing_replay = str(model), setting
    return config


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as error:
        check_routing_replay(config, read_model_config(config.model.path))
    return str(error.value)


def test_auto_replays_what_engines_can_record(
    tiny_model: Path, tiny_sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, sparse = configured(tiny_model, "auto"), configured(tiny_sparse_model, "auto")
    assert not replays_routing(dense)
    assert replays_routing(sparse)
    assert records_experts(sparse)
    assert not replays_routing(configured(tiny_sparse_model, "off"))
    staged = replace(sparse, rollout=replace(sparse.rollout, pipeline_parallel=2))
    guessing = replace(sparse, rollout=replace(sparse.rollout, engine_options={"speculative_config": {"method": "x"}}))
    assert not replays_routing(staged)
    assert not replays_routing(guessing)
    for config in (dense, sparse, staged, guessing):
        check_routing_replay(config, read_model_config(config.model.path))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert not replays_routing(sparse)


def test_on_is_refused_where_nothing_is_recorded(
    tiny_model: Path, tiny_sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "trainer.routing_replay=on needs a mixture of experts" in refusal(configured(tiny_model, "on"))
    sparse = configured(tiny_sparse_model, "on")
    check_routing_replay(sparse, read_model_config(tiny_sparse_model))
    assert replays_routing(sparse)
    staged = replace(sparse, rollout=replace(sparse.rollout, pipeline_parallel=2))
    assert "rollout.pipeline_parallel=2" in refusal(staged)
    guessing = replace(sparse, rollout=replace(sparse.rollout, engine_options={"speculative_config": {"method": "x"}}))
    assert "rollout.engine_options.speculative_config" in refusal(guessing)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in refusal(sparse)


def test_an_evaluation_records_nothing_and_refuses_nothing(tiny_model: Path, tiny_sparse_model: Path) -> None:
    for model in (tiny_model, tiny_sparse_model):
        config = configured(model, "on")
        config.evaluation.only = True
        check_routing_replay(config, read_model_config(model))
        assert not records_experts(config)
