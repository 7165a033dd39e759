"""What tests of whole configurations share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.validation import load_config


@pytest.fixture
def config_file(tmp_path: Path, tiny_model: Path) -> Path:
    """A configuration that passes all checks."""
    path = tmp_path / "run.yaml"
    rollout = "rollout: {max_model_len: 1024, max_new_tokens: 64}"
    path.write_text(f"model: {{path: {tiny_model}}}\n{rollout}\nring: {{capacity_mib: 64}}\n")
    return path


def refusal(check: Callable[..., Any], *arguments: Any) -> str:
    """The one line with which `check` refuses a configuration."""
    with pytest.raises(ConfigError) as caught:
        check(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def error(path: Path, *overrides: str) -> str:
    """The refusal of a whole configuration."""
    return refusal(load_config, path, list(overrides))
