"""The architectures that the package knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.architectures import LAYER_MAPPINGS
from megatron_webrl.model.hf_config import ARCHITECTURES, JOB_ARCHITECTURES, read_model_config


def test_every_architecture_has_a_check_and_a_parameter_map() -> None:
    assert ARCHITECTURES.keys() == LAYER_MAPPINGS.keys()
    assert ARCHITECTURES.keys() >= set(JOB_ARCHITECTURES)


def test_a_job_refuses_a_model_without_an_engine_map(tmp_path: Path) -> None:
    [name, *_] = ARCHITECTURES.keys() - set(JOB_ARCHITECTURES)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ConfigError, match=f"model_type='{name}'; only qwen3_vl and qwen3_vl_moe can be trained"):
        read_model_config(tmp_path)
