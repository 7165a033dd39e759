"""Fixtures of the tests of `webrl check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.checks import network
from megatron_webrl.checks.model import screenshot
from megatron_webrl.model.processor import Processor
from tests import forks


@pytest.fixture(autouse=True)
def _fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of checks start from the server of the tests, which has imported torch."""
    forks.context()
    monkeypatch.setattr(network, "warm_up", lambda: None)


@pytest.fixture(scope="session")
def processor(tiny_model: Path) -> Processor:
    """The tiny model's processor."""
    return Processor.load(tiny_model)


@pytest.fixture
def samples_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines, dictionaries or text, as a samples file next to two images."""
    (tmp_path / "page.png").write_bytes(screenshot(1, 160, 96))
    (tmp_path / "wide.png").write_bytes(screenshot(2, 256, 64))

    def write(*lines: Any) -> Path:
        path = tmp_path / "samples.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write
