"""The architectures that the package knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.architectures import LAYER_MAPPINGS
from megatron_webrl.model.hf_config import ARCHITECTURES, read_model_config


def test_every_architecture_has_a_check_and_a_parameter_map() -> None:
    assert ARCHITECTURES.keys() == LAYER_MAPPINGS.keys()


def test_a_job_refuses_an_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ConfigError, match="model_type='llava'; only qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe can"):
        read_model_config(tmp_path)
