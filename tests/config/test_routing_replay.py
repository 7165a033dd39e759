"""The setting trainer.routing_replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.vision_language.routing_replay import check_routing_replay, records_experts, replays_routing
from tests.config.conftest import refusal


@pytest.fixture(autouse=True)
def first_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def configured(model: Path, setting: str) -> Config:
    config = Config()
    config.model.path, config.trainer.routing_replay = str(model), setting
    return config


def refused(config: Config) -> str:
    return refusal(check_routing_replay, config, read_model_config(config.model.path))


def unrecorded(config: Config) -> tuple[Config, Config]:
    """The configuration with engines of several stages, and with engines that guess tokens."""
    guesses = {"speculative_config": {"method": "x"}}
    staged, guessing = replace(config.rollout, pipeline_parallel=2), replace(config.rollout, engine_options=guesses)
    return replace(config, rollout=staged), replace(config, rollout=guessing)


def test_auto_replays_what_engines_can_record(
    tiny_model: Path, tiny_sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, sparse = configured(tiny_model, "auto"), configured(tiny_sparse_model, "auto")
    assert not replays_routing(dense)
    assert replays_routing(sparse)
    assert records_experts(sparse)
    assert not replays_routing(configured(tiny_sparse_model, "off"))
    staged, guessing = unrecorded(sparse)
    assert not replays_routing(staged)
    assert not replays_routing(guessing)
    for config in (dense, sparse, staged, guessing):
        check_routing_replay(config, read_model_config(config.model.path))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert not replays_routing(sparse)


def test_on_is_refused_where_nothing_is_recorded(
    tiny_model: Path, tiny_sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "trainer.routing_replay=on needs a mixture of experts" in refused(configured(tiny_model, "on"))
    sparse = configured(tiny_sparse_model, "on")
    check_routing_replay(sparse, read_model_config(tiny_sparse_model))
    assert replays_routing(sparse)
    staged, guessing = unrecorded(sparse)
    assert "rollout.pipeline_parallel=2" in refused(staged)
    assert "rollout.engine_options.speculative_config" in refused(guessing)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in refused(sparse)


def test_an_evaluation_records_nothing_and_refuses_nothing(tiny_model: Path, tiny_sparse_model: Path) -> None:
    for model in (tiny_model, tiny_sparse_model):
        config = configured(model, "on")
        config.evaluation.only = True
        check_routing_replay(config, read_model_config(model))
        assert not records_experts(config)
